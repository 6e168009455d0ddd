"""The bars of optimizer steps alone; plain values, so that pages can be made without torch."""

STEP_BARS = {
    "host, flat fused / FSDP2's best": 0.05,
    "large, flat fused / FSDP2 default": 0.35,
    "large, flat fused / FSDP2 fused": 1.05,
}
