"""Each method, and each rule longer than a few lines, has a file of its own name, which is imported on demand.

Shared by several methods: `evaluation.py` (final evaluation), `tier_search.py` and `target_search.py` (the searches of
FedorAS and SuperFedNAS), `tier_models.py` (the models of HeteroFL and similar methods), `silos.py` and `silo_search.py`
(cross-silo methods). Methods are registered in `registry.py`, rules here.
"""

from fedloom.platform.averaging.server import SERVER_RULES
from fedloom.platform.clients.local_rules import LOCAL_RULES
from fedloom.platform.federation.selection import SELECTION_RULES

SELECTION_RULES.register(
    {name: f"{__name__}.simple_selection:{name}" for name in ("power_of_choice", "round_robin", "tier_quota")}
    | {name: f"{__name__}.{name}:{name}" for name in ("oort", "pyramidfl")}
)
LOCAL_RULES.register(
    {
        "scaffold": f"{__name__}.scaffold:Scaffold",
        "feddyn": f"{__name__}.feddyn:FedDyn",
        "fednova": f"{__name__}.fednova:FedNova",
    }
)
SERVER_RULES.register({name: f"{__name__}.{name}:{name}" for name in ("feddyn", "fednova")})
