r"""The race: optimizers trained on the same tasks under rules that were fixed before any run.

Where things are:

- ``tune.py``: ``RULES``, the rules in words, and ``plan``, which turns the records so far into the next runs.
- ``tasks.py``: the tasks and the hyper-parameters of a run. A new task is one entry in ``TASKS``.
- ``methods.py``: builds the optimizer of each method. A new method is one function in ``METHODS``, and needs a guess
  and two beta values in every task that should race it (``guesses`` and ``betas``).
- ``data.py``: loads texts and splits them into training, validation and test parts.
- ``train.py``: the problems (model, loss, batches, evaluation) and the one training loop.
- ``run.py``: ``python -m egop_lab.race.run``; worker processes share one GPU, records are appended to a JSONL file.
- ``results.py``: reads records and prints what they say so far.

A slice on a GPU, with WikiText-2 in ``.data/wikitext-2``::

    PYTHONPATH=src:lab/src python -m egop_lab.race.run --tasks gpt-6x384-400 --data .data --workers 4 --mps \
        --budget 540 --records docs/records/race.jsonl --out $OUT/race.jsonl

Append the new file to ``docs/records/race.jsonl`` before the next slice: finished runs are not repeated.
``--show`` prints the results without running anything.

Missing so far:

- Problems for images (ResNet-34, ViT on Imagenette, with SGD + momentum on ResNet) and for tokens (GPT 124M on
  ``code``, with ``torch.compile``). ``train.make_problem`` is where they go; ``tasks.py`` lists their plain settings.
- The methods PolarAdam, EGOP, and EGOP in a random rotation. EGOP's second beta is to be chosen with its variant.
- Step times (seven rounds, methods in turns): nothing recorded here is a time to quote, since runs share the GPU.
"""
