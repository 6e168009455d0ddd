"""What tools that check an installation read of core: plugins, what is wrong with them, torch.

:func:`installed_plugins` finds plugins, :func:`problems_of` looks at one, :func:`unmet` and
:func:`circle_of` at how the contracts of several fit together.
"""

from polyshard._torch.newer import NEWEST as NEWEST_TORCH
from polyshard._torch.newer import OLDEST as OLDEST_TORCH
from polyshard._torch.newer import release as torch_release
from polyshard._torch.newer import tested_range as tested_torch
from polyshard.plugins.contract import HOOK_API, Contract, circle_of, contract_of, unmet
from polyshard.plugins.discovery import Installed, installed_plugins, load_plugin
from polyshard.plugins.validation import hook_arguments, problems_of

__all__ = [
    "HOOK_API",
    "NEWEST_TORCH",
    "OLDEST_TORCH",
    "Contract",
    "Installed",
    "circle_of",
    "contract_of",
    "hook_arguments",
    "installed_plugins",
    "load_plugin",
    "problems_of",
    "tested_torch",
    "torch_release",
    "unmet",
]
