r"""The race: optimizers trained on the same tasks under rules that were fixed before any run.

- ``tune.py``: ``RULES``, the rules in words, and ``plan``, which turns the records so far into the next runs.
- ``tasks.py``: the tasks and the hyper-parameters of a run. A new task is one entry in ``TASKS``.
- ``methods.py``: builds the optimizer of each method. A new method is one function in ``METHODS``, and needs a guess
  and its beta values in every task that should race it (``guesses`` and ``betas``).
- ``variants.py``: variants of EGOP that are raced against it.
- ``data.py``: loads texts, tokens and images. ``problems.py``: models with their data. ``train.py``: the training loop.
- ``run.py``: ``python -m egop_lab.race.run``; worker processes share one GPU, records are appended to a JSONL file.
- ``timing.py``: ``python -m egop_lab.race.timing``; times that ``run`` records are of runs that share the GPU.
- ``results.py``: reads records and prints what they say so far.
- ``tables.py``: ``python -m egop_lab.race.tables`` writes the tables of the README and the docs from the records, and
  the picture of ``picture.py``.

A slice on a GPU, with WikiText-2 in ``.data/wikitext-2``::

    PYTHONPATH=src:lab/src python -m egop_lab.race.run --race gpt-6x384-400 AdamW EGOP --data .data --workers 4 --mps \
        --budget 540 --records docs/records/race.jsonl --out $OUT/race.jsonl

Append the new file to ``docs/records/race.jsonl`` before the next slice: finished runs are not repeated. ``--show``
prints the results without running anything. ``--race`` may be repeated; workers take the first run that fits.

Two commands fill a GPU better than one if an MPS daemon runs already (``nvidia-cuda-mps-control -d``; leave out
``--mps``) and the less urgent one has ``CUDA_MPS_CLIENT_PRIORITY=1``.

``gpt-12x768-code`` needs ``.data/code/train.txt.xz`` and ``val.txt.xz`` (``lab/make_code.py`` builds them) and one
worker: it compiles the model, and fills the GPU. The archives hold no paths, so that validation and test part are
different files of packages that are also in the training part. ``resnet-34`` and ``vit-6x384`` need
``.data/imagenette/train/CLASS/*.jpg`` and ``val/CLASS/*.jpg``.
"""
