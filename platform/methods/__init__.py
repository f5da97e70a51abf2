"""A method is one file with its name, and so is a rule of more than a few lines; both are imported on demand.

What methods share: `evaluation.py` the final evaluation, `tier_search.py` and `target_search.py` the searches of
FedorAS and SuperFedNAS, `tier_models.py` the models of HeteroFL and its like, `silos.py` and `silo_search.py` the
cross-silo methods. Methods are named in `registry.py`, the rules here.
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
