"""The methods, and the built-in rules of more than a few lines, which are registered here and imported on demand."""

from fedloom.platform.averaging.server import SERVER_RULES
from fedloom.platform.clients.local_rules import LOCAL_RULES
from fedloom.platform.federation.selection import SELECTION_RULES

SELECTION_RULES.register(
    {name: f"{__name__}.selection.simple:{name}" for name in ("power_of_choice", "round_robin", "tier_quota")}
    | {name: f"{__name__}.selection.{name}:{name}" for name in ("oort", "pyramidfl")}
)
LOCAL_RULES.register(
    {
        "scaffold": f"{__name__}.optimisers.scaffold:Scaffold",
        "feddyn": f"{__name__}.optimisers.feddyn:FedDyn",
        "fednova": f"{__name__}.optimisers.fednova:FedNova",
    }
)
SERVER_RULES.register({name: f"{__name__}.optimisers.{name}:{name}" for name in ("feddyn", "fednova")})
