import json
import math

import pytest

from egop_lab.files import replace_atomically, write_json


def test_json_has_null_for_nonfinite_numbers(tmp_path):
    write_json(tmp_path / "new" / "a.json", {"losses": (1.5, math.nan, -math.inf), "name": "x"})
    assert json.loads((tmp_path / "new" / "a.json").read_text()) == {"losses": [1.5, None, None], "name": "x"}


def test_failed_write_keeps_old_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail_halfway():
        with replace_atomically(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_halfway()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
