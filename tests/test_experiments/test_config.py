"""From `key=value` to a checked configuration, and back from what a run stored."""

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from types import ModuleType
from typing import Any

import pytest

from fedloom.experiments.python import overrides_of
from fedloom.experiments.runs.configuration import change_stored, compose_config, config_from_dict
from fedloom.experiments.runs.overrides import read
from fedloom.experiments.runs.presets import CONF, experiments
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.method import Method
from fedloom.platform.methods import fedavg
from fedloom.platform.methods.registry import METHODS
from fedloom.platform.plugins import PluginError
from fedloom.platform.results.paths import NO_NAMES
from fedloom.platform.runs.resuming import what_is_computed
from fedloom.platform.settings import Setting, settings_of


def test_an_override_changes_its_value_and_nothing_else() -> None:
    plain = asdict(compose_config(["experiment=fedoras_digits"]))
    changed = asdict(compose_config(["experiment=fedoras_digits", "method.train.lr=0.03", "seeds.partition=7"]))
    plain["method"]["train"]["lr"] = 0.03
    plain["seeds"]["partition"] = 7
    assert changed == plain


def test_values_have_the_types_of_the_schema() -> None:
    overrides = ["tiers.upper_bounds=[1e6,2e6]", "data.alpha=1", "executor.actors=2", "ray.dashboard=true"]
    config = compose_config(overrides)
    assert config.tiers.upper_bounds == [1e6, 2e6]
    assert (config.data.alpha, type(config.data.alpha)) == (1.0, float)
    assert config.executor.actors == 2
    assert config.ray.dashboard is True


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("name=2026_08_07", "2026_08_07"),
        ("name=1e5", "1e5"),
        ("name=null", None),
        ("+name='1.10'", "1.10"),
        ("results=1.10", "1.10"),
        ("results=runs/1.10", "runs/1.10"),
        ("data.root=-.5", "-.5"),
        ("data.cache=null", None),
        ("tracking.project=2_0", "2_0"),
        ("tags=[8e12345, 1.10 ,a,'1, 1.10',inf]", ["8e12345", "1.10", "a", "1, 1.10", "inf"]),
    ],
)
def test_text_that_looks_like_a_number_stays_as_it_was_typed(override: str, value: str | list[str] | None) -> None:
    assert read(override).value == value


def test_nothing_chosen_is_the_schemas_default() -> None:
    config = compose_config([])
    assert asdict(config) == asdict(RunConfig(method=METHODS["fedoras"].config()))


@pytest.mark.parametrize("preset", experiments())
def test_every_preset_composes_under_its_own_name(preset: str) -> None:
    config = compose_config([f"experiment={preset}"])
    assert config.experiment == preset
    assert isinstance(config.method, tuple(method.config for method in METHODS.values()))
    head = (CONF / "experiment" / f"{preset}.yaml").read_text().splitlines()[:2]
    assert head[0] == "# @package _global_"
    assert head[1].startswith("# "), "says what it is"


def test_fedoras_settings_are_those_of_its_tables_and_its_authors_code() -> None:
    """RandAugment and Cutout are the supernet's alone; 500 rounds are Tab. 9's, 750 those behind Tab. 5 and 6."""
    presets = ("fedoras_cifar10", "fedoras_cifar100", "fedoras_cifar100_750")
    methods = [compose_config([f"experiment={preset}"]) for preset in presets]
    assert [(c.data.augment, c.method.train.augment) for c in methods] == [
        ("crop_flip", "crop_flip_randaugment_cutout")
    ] * 3
    assert [(c.method.finetune.augment, c.method.rand_init.augment) for c in methods] == [(None, None)] * 3
    assert [c.method.train.rounds for c in methods] == [500, 500, 750]
    assert compose_config(["experiment=random_nas_cifar10"]).data.augment == "crop_flip"


def test_another_method_takes_its_own_keys() -> None:
    config = compose_config(["method=fedavg", "method.train.rounds=3", "method.evaluate=false"])
    assert config.method.name == "fedavg"
    assert config.method.train.rounds == 3
    with pytest.raises(ValueError, match=r"unknown configuration key 'method.search.budget'"):
        compose_config(["method=fedavg", "method.search.budget=3"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.alfa=1", "unknown configuration key 'data.alfa'; did you mean 'data.alpha'?"),
        ("+data.alfa=1", "unknown configuration key 'data.alfa'; did you mean 'data.alpha'?"),
        ("++data.alfa=1", "unknown configuration key 'data.alfa'; did you mean 'data.alpha'?"),
        ("+alpha=1", "unknown configuration key 'alpha'"),
        ("method.train.clients_per_rounds=3", "did you mean 'method.train.clients_per_round'?"),
        ("executor.failures.polcy=stop", "did you mean 'executor.failures.policy'?"),
        ("experiment=fedoras_cifar11", "no such preset; did you mean 'fedoras_cifar10'?"),
        ("method=fedavgg", "no such method; did you mean 'fedavg'?"),
        ("seed=one", "one"),
        ("data=3", "data"),
        ("data.alpha", "'data.alpha' is not of the form key=value"),
        ("executor.chunk_size=0", "executor.chunk_size=0: must be between 1 and 1000000"),
        ("checkpoint.every=0", "checkpoint.every=0: must be at least 1"),
        ("tiers.count=0", "tiers.count=0: must be between 1 and 1000"),
        ("tiers.shares=[.5,", "tiers.shares"),
        ("data.alpha=${nowhere}", "nowhere"),
        ("tags.0=a", "tags.0: the list has 0 entries, from 0: give one of them, or the whole list"),
        ("tags.x=a", "tags.x: the list has 0 entries"),
    ],
)
def test_a_bad_override_is_one_clear_line(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as refusal:
        compose_config([override])
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value).strip()


def test_free_mappings_take_new_keys() -> None:
    assert compose_config(["+space.options.depth=3"]).space.options == {"depth": 3}


# -- a method of one's own ---------------------------------------------------------------------------------------------


@dataclass
class Phase:
    """A group of keys."""

    rounds: int = 1
    share: float = 0.5


class Mode(Enum):
    """What a run's files cannot hold."""

    FAST = "fast"


@dataclass
class PhasesConfig(fedavg.FedAvgConfig):
    """FedAvg with keys of other kinds."""

    first: Phase | None = None
    phases: list[Phase] = field(default_factory=list)
    by_round: dict[int, float] = field(default_factory=dict)
    mode: Mode | None = None


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> str:
    """The override that chooses a method with this configuration."""
    module = ModuleType("own_phases")
    module.__dict__["METHOD"] = Method(PhasesConfig, fedavg.stages, kind="shared", lacks=("candidates",))
    monkeypatch.setitem(sys.modules, "own_phases", module)
    return "method=own_phases:METHOD"


def test_keys_of_a_method_may_be_groups_lists_of_groups_and_mappings(phases: str) -> None:
    given = ["method.first={rounds: 2}", "method.phases=[{share: 0.1}]", "method.by_round={1: 0.5}"]
    config = compose_config([phases, *given])
    assert config.method.first == Phase(rounds=2)
    assert (config.method.phases, config.method.by_round) == ([Phase(share=0.1)], {1: 0.5})
    assert config_from_dict(json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("method.first={rund: 1}", "unknown configuration key 'method.first.rund'; did you mean 'method.first.rounds'"),
        ("method.phases=[{rund: 1}]", "unknown .* 'method.phases.0.rund'; did you mean 'method.phases.0.rounds'"),
        ("method.first={rounds: x}", "method.first.rounds=x: must be an int"),
    ],
)
def test_a_mistake_inside_a_group_is_named_by_its_key(phases: str, override: str, line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line}"):
        compose_config([phases, override])


def test_keys_of_a_group_that_is_null_can_be_given_one_by_one(phases: str) -> None:
    config = compose_config([phases, "method.first.rounds=2", "method.first.share=0.1"])
    assert config.method.first == Phase(2, 0.1)
    assert compose_config([phases, *overrides_of({"method.first": asdict(Phase(2, 0.1))})]) == config
    with pytest.raises(ValueError, match=r"^unknown .* 'method.first.rund'; did you mean 'method.first.rounds'\?$"):
        compose_config([phases, "method.first.rund=2"])
    with pytest.raises(ValueError, match=r"^unknown .* 'method.train.local_rule.mu'; did you mean"):
        compose_config([phases, "method.train.local_rule.mu=2"])


def test_a_method_whose_values_cannot_be_written_down_is_refused(phases: str) -> None:
    line = "^method 'own_phases:METHOD': its config cannot be composed: .* type Mode .*; give fields of numbers, "
    with pytest.raises(PluginError, match=line):
        compose_config([phases, "method.mode=fast"])


# -- what a run stored -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", [*experiments(), "method=fedavg"])
def test_a_stored_configuration_gives_the_same_again(preset: str) -> None:
    override = preset if "=" in preset else f"experiment={preset}"
    config = compose_config([override, "seed=5", "tiers.upper_bounds=[1e8,8e8]", "executor.failures.policy=retry"])
    again = config_from_dict(json.loads(json.dumps(asdict(config))))
    assert again == config
    assert type(again.method) is type(config.method)


def test_a_stored_configuration_of_another_version_is_refused() -> None:
    stored = asdict(compose_config([]))
    stored["data"]["gone"] = 1
    with pytest.raises(ValueError, match=r"does not fit this version: .*gone"):
        config_from_dict(stored)
    stored = asdict(compose_config([]))
    stored["method"]["name"] = "fedprox"
    with pytest.raises(ValueError, match=r"unknown method 'fedprox': known are apfl, depthfl, ditto,"):
        config_from_dict(stored)


def test_a_configuration_from_before_a_key_means_what_it_meant() -> None:
    stored = asdict(compose_config(["experiment=fedoras_digits"]))
    changed = [stored["method"]["search"].pop(key) for key in ("objectives", "statistics")]
    search = config_from_dict(stored).method.search
    assert (changed, search.objectives, search.statistics) == (["metric", "estimated"], "metric_and_cost", "averaged")
    stored = asdict(compose_config(["data.dataset=speech_commands"]))
    stored["data"]["options"] = {"classes": 12}
    assert config_from_dict(stored).data.options == {"classes": 12}
    del stored["data"]["balanced_classes"]  # which came with other features of sounds
    assert config_from_dict(stored).data.options == {"classes": 12, "features": "slaney", "silence": None}
    stored["objective"]["name"] = "masked_classes"
    assert config_from_dict(stored).objective.options == {"in_mean": False}


def test_a_resumed_run_may_change_where_it_runs() -> None:
    config = compose_config(["experiment=fedoras_digits"])
    changes = ["executor.kind=serial", "executor.actors=1", "ray.num_cpus=1", "executor.failures.policy=tolerate"]
    changed = change_stored(config, changes)
    assert (changed.executor.kind, changed.executor.actors, changed.ray.num_cpus) == ("serial", 1, 1)
    assert changed.executor.failures.policy == "tolerate"
    elsewhere = change_stored(config, ["data.root=/data", "checkpoint.every=5"])
    assert (elsewhere.data.root, elsewhere.checkpoint.every) == ("/data", 5)
    assert what_is_computed(asdict(elsewhere)) == what_is_computed(asdict(config))
    assert what_is_computed(asdict(replace(config, results="moved"))) == what_is_computed(asdict(config))
    assert what_is_computed(asdict(replace(config, seed=2))) != what_is_computed(asdict(config))
    assert (changed.method, changed.data, changed.tiers) == (config.method, config.data, config.tiers)


@pytest.mark.parametrize(
    "override",
    [
        "data.alpha=2",
        "seed=2",
        "method.train.lr=1",
        "executor.chunk_size=2",
        "executor.threads=2",
        "+seed=2",
        "results=x",
    ],
)
def test_a_resumed_run_may_not_change_what_it_computes(override: str) -> None:
    with pytest.raises(ValueError, match=r"cannot change on resume.*change only executor.kind"):
        change_stored(compose_config([]), [override])


@pytest.mark.parametrize(
    ("override", "message"),
    [("executor.kind=mpi", "must be one of"), ("ray.nodes=3", "nodes"), ("executor.actors=two", "executor.actors")],
)
def test_what_may_change_on_resume_is_checked_too(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        change_stored(compose_config([]), [override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("name", "'name' is not of the form key=value"),
        ("executor.actors", "'executor.actors' is not of the form key=value"),
        ("tags", "'tags' is not of the form key=value"),
        ("foo", "'foo' is not of the form key=value"),
        ("~name", "'~name' is not of the form key=value"),
        ("name=", "name=: must be a text of at least one character, or null"),
        ("ray.address=", "ray.address=: must be a text of at least one character"),
        ("executor.actors=", "executor.actors=: must be an int or null"),
        ("executor.actors=1,2", "executor.actors=1,2: give one value; a list is"),
        ("tags=[a", r"tags=\[a cannot be read .*a list as \[1,2\]"),
        ("results=~/x", r"results=~/x cannot be read .*, or the value in quotes: results='\"\.\.\.\"'$"),
        ("tags=paper", "tags=paper: must be a list\\[text\\]"),
        ("ray.adress=auto", "unknown configuration key 'ray.adress'; did you mean 'ray.address'"),
        ("nmae=x", "unknown configuration key 'nmae'; did you mean 'name'"),
        ("ray.dashboard=maybe", "ray.dashboard=maybe: must be true or false"),
        ("experiment=fedavg_digits", "experiment cannot change on resume"),
    ],
)
def test_what_is_typed_on_resume_is_read_as_that_of_a_run(override: str, message: str) -> None:
    config = compose_config(["experiment=fedoras_digits", "name=baseline"])
    with pytest.raises(ValueError, match=message) as refusal:
        change_stored(config, [override])
    assert "\n" not in str(refusal.value)


def test_a_name_is_only_taken_away_by_null() -> None:
    config = compose_config(["experiment=fedoras_digits", "name=baseline", "tags=[paper]"])
    assert change_stored(config, []).names == config.names
    assert change_stored(config, ["name=null", "tags=[]"]).names == NO_NAMES
    moved = change_stored(config, ["ray.address=HEAD:6379", "executor.client_timeout_s=inf", "tags=[a,b]"])
    assert (moved.ray.address, moved.executor.client_timeout_s, moved.tags) == ("HEAD:6379", math.inf, ["a", "b"])
    grouped = change_stored(config, ["executor.failures={policy: retry, attempts: 3}"])
    assert (grouped.executor.failures.policy, grouped.executor.failures.attempts) == ("retry", 3)
    assert grouped.executor.failures.max_share == config.executor.failures.max_share


# -- the public surface ------------------------------------------------------------------------------------------------


def public_settings() -> Iterator[Setting]:
    """Every key of a run, and of every method, depth first."""
    yield from (setting for setting in settings_of(RunConfig()) if setting.key != "method")
    for name, method in METHODS.items():
        yield from settings_of(method.config(), f"method({name}).")


def test_every_key_says_what_it_is() -> None:
    for setting in public_settings():
        if not setting.key.endswith(".name"):
            assert 3 < len(setting.help) < 400, setting.key
            assert setting.help == " ".join(setting.help.split()), setting.key


PUBLIC = {
    "APFLConfig": "name alpha adaptive",
    "AdaptationConfig": "epochs lr",
    "ArchitectureSearchConfig": "kind start every prune_edges statistics max_macs rounds lr validation_weight",
    "AttackConfig": "share name options",
    "BudgetConfig": "kind factors states options",
    "CheckpointConfig": "every",
    "CommunicationConfig": "unit value one_per_round",
    "DataConfig": (
        "dataset root cache download train_samples test_samples sequence_length partition num_clients alpha "
        "shards_per_client noise rotation "
        "validation_share test_share label_sets augment balanced_classes options"
    ),
    "DepthFLConfig": "name distillation ramp_up train evaluation",
    "DevicesConfig": (
        "macs_per_s down_bytes_per_s up_bytes_per_s availability dropout availability_table availability_period_s "
        "availability_share jitter server_bytes_per_s deadline_s"
    ),
    "DistillationConfig": "steps batch_size lr share",
    "DistributionConfig": "heuristic tier_aware",
    "DittoConfig": "name train",
    "DittoTrainingConfig": "pull",
    "ElasticTrainingConfig": (
        "rounds clients_per_round epochs batch_size momentum clip_norm travels distribution shares shrinking evaluate"
    ),
    "EvaluationConfig": "clients_per_tier",
    "ExecutorConfig": (
        "kind actors resident chunk_size sum_chunks threads stack_clients precision deterministic memory_format "
        "compile client_timeout_s failures"
    ),
    "FailuresConfig": "policy attempts max_share actor_attempts",
    "FedAvgConfig": "name architecture tier train evaluate evaluation",
    "FedMaskConfig": "name train",
    "FedMaskTrainingConfig": "score kept masked schedule weighting",
    "FedDFConfig": "name architectures train distillation evaluation",
    "FedMnConfig": "name train adapt",
    "FedMnTrainingConfig": "pretraining_rounds router_lr temperature",
    "FedNasConfig": "name train search",
    "FedPnasConfig": "name base_cells train search",
    "FedProtoConfig": "name train",
    "FedProtoTrainingConfig": "pull",
    "FedRolexConfig": "name step train",
    "FedorASConfig": "name train search finetune rand_init evaluation",
    "FjordConfig": "name distillation temperature",
    "GainConfig": "epochs clients lr start tune_own epoch",
    "GlobalNasConfig": "name train search",
    "FLoRAConfig": "name",
    "FlexLoRAConfig": "name",
    "HetLoRAConfig": "name decay penalty norm_weights",
    "HeteroFLConfig": "name dynamic train",
    "InnerStepsConfig": "steps lr",
    "KnnPerConfig": "name neighbours scale",
    "LocalAdaptationConfig": "name adapt",
    "LoraConfig": "ranks layers trained alpha merged",
    "OFAConfig": "name family train search evaluation",
    "OFATrainingConfig": "full_share depth_share subnets_per_batch teaching sort_channels evaluate",
    "ObjectiveConfig": "name options",
    "PFedMeConfig": "name train",
    "PFedMeTrainingConfig": "pull inner_steps outer_lr beta momentum clip_norm schedule weighting",
    "PerFedAvgConfig": "name train adapt",
    "PerFedAvgTrainingConfig": "local_factor",
    "PersonalConfig": "name personal train",
    "PersonalTrainingConfig": "personal_epochs",
    "PrivacyConfig": "clip noise delta weight_cap least_coverage secure fraction_bits survivors accountant",
    "RandomNasConfig": "name models metric train evaluation",
    "RayConfig": "address num_cpus num_gpus object_store_memory_bytes dashboard wait_s detached",
    "RunConfig": (
        "experiment name tags seed results dry_run reuse_supernet tensorboard tracking data objective space tiers "
        "devices attack method stop executor ray checkpoint seeds"
    ),
    "ScaleFLConfig": "name distillation temperature distil_after train",
    "SearchConfig": (
        "searcher population offspring mutation parents budget metric objectives statistics validation_share options"
    ),
    "SeedsConfig": "partition initialisation selection training search",
    "SharesConfig": "rule beta_0 decay decay_share",
    "ShrinkingConfig": "subnets_per_batch depth_share sandwich distillation",
    "SiloTrainingConfig": (
        "rounds clients_per_round batch_size lr momentum clip_norm schedule final_lr_share use_validation test_every"
    ),
    "SpaceConfig": (
        "name num_classes heads input_shape stem_channels stem_stride stage_layers stage_strides depthwise_link "
        "operators stage_widths depths expansions widths scaler coupled width_multiplier norm initialisation bias "
        "channels embedding_size blocks patch_size attention_heads mlp_ratio head_shares kernel_size dropout "
        "embedding_dropout tied cells nodes stem_multiplier affine modules lora build weights weights_names options"
    ),
    "SpiderConfig": "name train search gains",
    "SpiderTrainingConfig": "pull keep_momentum own_start",
    "SplitMixConfig": "name train",
    "StopConfig": "metric patience target weights",
    "SubnetConfig": "name architecture train",
    "SuperFedNASConfig": "name family separately train search evaluation",
    "SupernetConfig": "rounds epochs batch_size min_contributors weighting paths evaluate_paths communication",
    "TargetSearchConfig": (
        "macs macs_above latency_s tolerance metric predictor samples validation_share min_tau hidden epochs "
        "population parents mutation generations verify front budget latency_repeats candidates_per_task options"
    ),
    "TierSearchConfig": ("budgets scoring scoring_rounds clients_per_round compare_with_central candidates_per_task"),
    "TiersConfig": (
        "count rho_low rho_high upper_bounds paths cost cost_weights unsupported shares clients tasks device_table "
        "max_step_s step_batch_size budget num_gpus num_cpus"
    ),
    "TrackingConfig": "to project models",
    "TrainingConfig": (
        "rounds clients_per_round arrivals asynchronous max_staleness epochs batch_size optimizer optimizer_state lr "
        "momentum idle_momentum weight_decay "
        "clip_norm schedule final_lr_share step_rounds local_warmup_steps local_cosine_to min_contributors selection "
        "local_rule weighting server aggregator augment processors options loss_norms evaluate_every privacy"
    ),
    "TransferConfig": "name start_from model architecture tier from_scratch head train evaluation",
    "WidthConfig": "name train statistics_clients evaluation",
    "ZeroFLConfig": "name sparsity mask_ratio by",
}
"""The keys of every class of the configuration, without those of the class that it extends."""


def classes_of(config: Any) -> Iterator[type]:
    """The classes of a configuration, of its sections, and those that they extend."""
    yield from (kind for kind in type(config).__mro__ if is_dataclass(kind))
    for each in fields(config):
        if is_dataclass(section := getattr(config, each.name)):
            yield from classes_of(section)


def test_the_public_surface_changes_only_on_purpose() -> None:
    """A key that is gone breaks users' scripts; a new one belongs into `PUBLIC`."""
    configs = [RunConfig(), *(method.config() for method in METHODS.values())]
    kinds = {kind.__name__: " ".join(kind.__annotations__) for config in configs for kind in classes_of(config)}
    assert kinds == PUBLIC
