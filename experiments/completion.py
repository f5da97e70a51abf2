"""`fedloom completion SHELL`: a script that completes commands, keys, presets, names and runs in bash, zsh or fish.

The script holds all words, because collecting them imports torch, which takes seconds: pressing Tab starts no Python.
Only runs are looked up, as folders in `results`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from string import Template
from typing import Any

from fedloom.experiments.arguments import COMMANDS, OVERRIDES, PRINTED, RUNS, Argument
from fedloom.experiments.runs.presets import ablations, experiments


@dataclass(frozen=True)
class Words:
    """The words to complete: options by command, the commands that take overrides or runs, and keys with values."""

    options: Mapping[str, tuple[str, ...]]
    overriding: tuple[str, ...]
    of_runs: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]]


def _arguments(command: str) -> Iterable[Argument]:
    for each in (*PRINTED, *COMMANDS[command].arguments):
        yield from (each,) if isinstance(each, Argument) else each


def all_words() -> Words:
    """The words of this version, with the keys of all methods."""
    from fedloom.experiments.catalogue import known_code
    from fedloom.platform.federation.config import RunConfig
    from fedloom.platform.methods.registry import METHODS
    from fedloom.platform.settings import settings_of

    names = {command: [name for a in _arguments(command) for name in a.names] for command in COMMANDS}
    settings = [*settings_of(RunConfig()), *(s for m in METHODS.values() for s in settings_of(m.config(), "method."))]
    values: dict[str, tuple[str, ...]] = {s.key: () for s in settings if s.key != "method"}
    for point in known_code([]):
        values |= {key: tuple(code.name for code in point.built_in) for key in point.keys if key in values}
    values |= {"experiment": tuple(experiments()), "ablation": tuple(ablations()), "method": tuple(METHODS)}
    return Words(
        {command: tuple(n for n in sorted(options) if n.startswith("-")) for command, options in names.items()},
        tuple(c for c, options in names.items() if {*OVERRIDES} & {*options}),
        tuple(c for c, options in names.items() if {*RUNS} & {*options}),
        dict(sorted(values.items())),
    )


def script(shell: str, words: Words | None = None) -> str:
    """The completion script for a shell; `words` default to those of this version."""
    words = words or all_words()
    known: dict[str, Any] = {
        "commands": " ".join(COMMANDS),
        "overriding": "|".join(words.overriding),
        "of_runs": "|".join(words.of_runs),
        "keys": " ".join(f"{key}=" for key in words.values),
    }
    if shell == "fish":
        known["commands"] = "\n".join(
            f"complete -c fedloom -n __fish_use_subcommand -a {name} -d '{command.text.replace(chr(39), chr(8217))}'"
            for name, command in COMMANDS.items()
        )
        known["options"] = "\n".join(
            f"complete -c fedloom -n '__fish_seen_subcommand_from {name}' -l {option.removeprefix('--')}"
            for name, options in words.options.items()
            for option in options
        )
        known["values"] = "\n".join(
            f"      case '{key}=*'\n        printf '%s\\n' {' '.join(f'{key}={value}' for value in values)}"
            for key, values in words.values.items()
            if values
        )
        known["overriding"], known["of_runs"] = " ".join(words.overriding), " ".join(words.of_runs)
        return Template(FISH).substitute(known)
    known["options"] = "\n".join(
        f"    {name}) words='{' '.join(options)}' ;;" for name, options in words.options.items()
    )
    known["values"] = "\n".join(
        f"    {key}) words='{' '.join(values)}' ;;" for key, values in words.values.items() if values
    )
    text = Template(BASH).substitute(known)
    return f"#compdef fedloom\nautoload -U +X bashcompinit && bashcompinit\n{text}" if shell == "zsh" else text


BASH = r"""# Completion of fedloom: source <(fedloom completion bash), or the same with zsh.
_fedloom_runs() {
  command ls -d results/artifacts/* 2> /dev/null | command sed 's|.*/||'
}
_fedloom() {
  local line="$${COMP_LINE:0:$$COMP_POINT}" command="" words="" current="" before="" value=""
  current="$${line##* }"
  command="$${line#* }"
  command="$${command%% *}"
  COMPREPLY=()
  if [[ "$$line" != *" "*" "* ]]; then
    COMPREPLY=($$(compgen -W "$commands --help --version" -- "$$current"))
    compopt +o nospace 2> /dev/null
    return 0
  fi
  if [[ "$$current" == -* ]]; then
    case "$$command" in
$options
    esac
    COMPREPLY=($$(compgen -W "$$words --help" -- "$$current"))
    compopt +o nospace 2> /dev/null
    return 0
  fi
  case "$$command" in
    $overriding)
      if [[ "$$current" == *=* ]]; then
        before="$${current%%=*}="
        case "$${current%%=*}" in
$values
        esac
      else
        words="$keys"
      fi ;;
  esac
  case "$$command" in
    $of_runs)
      [[ "$$current" == *=* ]] || words="$$words $$(_fedloom_runs)" ;;
    completion) words="bash zsh fish" ;;
  esac
  value="$${current#"$$before"}"
  COMPREPLY=($$(compgen -W "$$words" -- "$$value"))
  # bash replaces what follows the last `=` alone, zsh the whole word.
  if [[ -n "$${ZSH_VERSION:-}" && -n "$$before" ]]; then COMPREPLY=("$${COMPREPLY[@]/#/$$before}"); fi
  return 0
}
complete -o nospace -o default -F _fedloom fedloom
"""

FISH = r"""# Completion of fedloom: fedloom completion fish | source
function __fedloom_values
    switch (commandline -ct)
$values
      case '*'
        printf '%s\n' $keys
    end
end
function __fedloom_runs
    command ls -d results/artifacts/* 2> /dev/null | string replace -r '.*/' ''
end
complete -c fedloom -f
$commands
$options
complete -c fedloom -n '__fish_seen_subcommand_from $overriding' -a '(__fedloom_values)'
complete -c fedloom -n '__fish_seen_subcommand_from $of_runs' -a '(__fedloom_runs)'
complete -c fedloom -n '__fish_seen_subcommand_from completion' -a 'bash zsh fish'
"""
