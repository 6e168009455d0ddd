"""Sharded training of a small byte-level language model on real text.

Start it with ``polyshard train`` or read ``examples/train_lm.py``. The files, in the order data
flows: `settings` (every option) · `text` (bytes and batches) · `model` · `engine` (which library
shards) · `ranks` (how they meet) · `passes` (forwards, backwards and what ranks add up) · `train`
(the loop) · `checkpoint` · `report` · `page` · `launch` (starts the ranks).
"""
