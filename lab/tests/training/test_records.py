"""Finished runs are kept: through kills, full disks and cut-off lines; a changed setting never finds an old record."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import signal
import time

import pytest

from egop_lab.training.records import Record, Store, config_key
from processes import prepared

CONFIG = {"experiment": "toy", "lr": 0.1, "seed": 3}


def a_record(**changes):
    return Record({**CONFIG, **changes}, {"loss": [2.0, 1.0, 0.5], "accuracy": 0.25}, 1.5, "cpu", {"torch": "2"})


def test_a_record_comes_back_as_it_was(tmp_path):
    Store(tmp_path / "toy.jsonl").add(a_record())
    assert list(Store(tmp_path / "toy.jsonl")) == [a_record()]


def test_what_is_not_finite_comes_back_as_nan(tmp_path):
    store = Store(tmp_path / "toy.jsonl")
    store.add(Record(CONFIG, {"loss": [1.0, math.inf, math.nan]}))
    (found,) = Store(tmp_path / "toy.jsonl")
    assert found.result["loss"][0] == 1.0
    assert all(math.isnan(value) for value in found.result["loss"][1:])


def test_a_configuration_is_found_whatever_the_order_of_its_settings(tmp_path):
    store = Store(tmp_path / "toy.jsonl")
    store.add(a_record())
    assert dict(reversed(CONFIG.items())) in store
    assert store.missing([CONFIG]) == []


def test_a_store_in_use_shows_the_numbers_that_it_will_read_again(tmp_path):
    store = Store(tmp_path / "toy.jsonl")
    store.add(Record(CONFIG, {"loss": [1 / 3, 2 / 3]}))
    assert list(store) == list(Store(tmp_path / "toy.jsonl"))


@pytest.mark.parametrize("change", [{"lr": 0.2}, {"seed": 4}, {"experiment": "other"}, {"added": 1}])
def test_a_changed_setting_never_finds_an_old_record(tmp_path, change):
    store = Store(tmp_path / "toy.jsonl")
    store.add(a_record())
    assert {**CONFIG, **change} not in store
    assert store.get({**CONFIG, **change}) is None
    assert config_key({**CONFIG, **change}) != config_key(CONFIG)


def test_a_line_that_was_cut_off_is_dropped_and_the_others_stay(tmp_path):
    path = tmp_path / "toy.jsonl"
    store = Store(path)
    for seed in (3, 4):
        store.add(a_record(seed=seed))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    store = Store(path)
    assert [record.config["seed"] for record in store] == [3]
    store.add(a_record(seed=4))
    assert path.read_bytes() == whole


def test_runs_that_end_together_share_a_line_and_come_back_one_by_one(tmp_path):
    path = tmp_path / "toy.jsonl"
    records = [a_record(seed=seed, decay=decay) for seed in range(5) for decay in (0, 0.0)]
    Store(path).add(*records)
    assert len(path.read_text().splitlines()) == 1
    found = Store(path)
    assert list(found) == records
    assert [record.key for record in found] == [record.key for record in records]
    assert path.read_text().count("experiment") == 1
    elsewhere = Record({**CONFIG, "seed": 9}, {"loss": [1.0]}, 1.0, "cuda", {"torch": "2"})
    found.add(a_record(seed=8), elsewhere)
    assert list(Store(path)) == [*records, a_record(seed=8), elsewhere]


def test_of_runs_that_share_a_line_that_was_cut_off_all_are_done_again(tmp_path):
    path = tmp_path / "toy.jsonl"
    Store(path).add(a_record(), a_record(seed=4))
    path.write_bytes(path.read_bytes()[:-20])
    assert len(Store(path)) == 0


def test_a_damaged_line_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "toy.jsonl"
    store = Store(path)
    for seed in (3, 4):
        store.add(a_record(seed=seed))
    lines = path.read_text().splitlines()
    path.write_text("\n".join(["{broken", lines[1]]) + "\n")
    with pytest.raises(ValueError, match=r"Line 1 of .*toy\.jsonl is not a record.*Repair or delete that line"):
        Store(path)
    assert path.read_text().splitlines()[1] == lines[1]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "toy.jsonl"
    store = Store(path)
    store.add(a_record())
    before = path.read_bytes()

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.add(a_record(seed=4))
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert {**CONFIG, "seed": 4} not in store
    store.add(a_record(seed=4))
    assert len(Store(path)) == 2


def work(path):
    """Record runs that take a moment and whose results depend on their configurations alone."""
    store = Store(path)
    for seed in range(40):
        config = {"seed": seed}
        if config in store:
            continue
        time.sleep(0.01)
        store.add(Record(config, {"curve": [seed * step / 7 for step in range(2000)]}))


def test_killed_at_random_moments_it_ends_as_an_undisturbed_run_does(tmp_path):
    undisturbed, killed = tmp_path / "undisturbed.jsonl", tmp_path / "killed.jsonl"
    work(undisturbed)
    random_moments = random.Random(0)
    kills, counts = 0, [0]
    while True:
        process = prepared().Process(target=work, args=(killed,), daemon=True)
        process.start()
        deadline = time.monotonic() + 30
        while not killed.exists() and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        if kills < 4:
            time.sleep(random_moments.uniform(0, 0.15))
            process.kill()
            kills += 1
        process.join(60)
        counts.append(len(killed.read_bytes().splitlines()) if killed.exists() else 0)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert counts == sorted(counts), "nothing that was finished is lost"
    assert killed.read_bytes() == undisturbed.read_bytes()
    assert [json.loads(line)["config"]["seed"] for line in killed.read_text().splitlines()] == list(range(40))
