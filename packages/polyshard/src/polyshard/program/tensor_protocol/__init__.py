"""FSDP2's tensor-subclass protocol on the engine's seams.

A parameter whose tensor class defines ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` decides
itself what travels and what the unsharded parameter is (torchao's quantized tensors do). Such
parameters form groups of their own. What the two methods take and return is found out once, while
the group is prepared, from the local shard alone: the sizes go into the plan that ranks compare,
and a later gather that does not match them is an error before anything is sent. Shards are padded
here, so the tensor class need not know about uneven ones.

The methods may also be put on the local tensor of a sharded parameter that is a plain one. That is
seen when the group is prepared; the other parameters of the group travel along as they are.
Since torch 2.15 a class may say that what arrived is not needed once it was given the outputs.

Source of the protocol: ``torch.distributed.fsdp``, ``fully_shard`` (torch 2.11 to 2.15).
"""

from polyshard.program.tensor_protocol.checks import (
    check_protocol,
    refuse_block,
    refuse_claims,
    uses_protocol,
)
from polyshard.program.tensor_protocol.gather import ProtocolGather
from polyshard.program.tensor_protocol.sides import ProtocolParts

__all__ = [
    "ProtocolGather",
    "ProtocolParts",
    "check_protocol",
    "refuse_block",
    "refuse_claims",
    "uses_protocol",
]
