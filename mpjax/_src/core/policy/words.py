"""What others write for a policy, and what it is here. Only errors read it."""

import fnmatch
import json
import re
from collections.abc import Collection, Mapping

# Names of policies elsewhere, and the string that means the same here, or what to do instead.
NAMES_ELSEWHERE = {
    "16": "16-mixed",  # Lightning, until 2.0
    "o4": "O1:bfloat16",  # Apex for ROCm
    "o5": "O2:bfloat16",
    **dict.fromkeys(("none", "off", "false", "disabled"), "float32"),
    **dict.fromkeys(("64", "64-true"), "float64"),
}

_SEPARATORS = r"[\s;,|&/+]+"
_AROUND = " \t\n;,|&/+'\""
# What others set by a key, and where it is set here.
KEYS_ELSEWHERE = {
    "*scale* *scaling* growth* backoff* hysteresis": (
        " Pass a loss scale to mpjax.mixed_precision or mpjax.build_train_step: "
        "loss_scale=mpjax.DynamicLossScale()."
    ),
    "*level dtype a*_dtype *precision": (
        " Write the name of a policy alone, such as 'O1' or 'mixed_bfloat16'."
    ),
    "enabled *_amp *_autocast": " The policy 'float32' turns mixed precision off.",
    "*white_list *allow_list fp16_ops": " Did you mean 'half_ops'?",
    "*black_list *deny_list fp32_ops": " Did you mean 'full_ops'?",
    "keep_*": " Did you mean 'keep_full'?",
    "*reduce*": " Did you mean 'reduce'?",
    "remat *checkpointing *recompute*": " Did you mean 'storage'?",
}

_MAPPING, _LISTS = "overrides", ("keep_full", "half_ops", "full_ops", "follow_ops")


def key_elsewhere(text: str) -> str:
    """Returns where a key is set, or the first one in a string that is none here, or ""."""
    said = re.findall(r"(\w+)\s*(?:[=:]|$)", text.lower())
    rows = ((hint, p) for patterns, hint in KEYS_ELSEWHERE.items() for p in patterns.split())
    return next((hint for hint, p in rows for key in said if fnmatch.fnmatchcase(key, p)), "")


def rewritten(text: str, keys: Mapping[str, str], values: Mapping[str, Collection[str]]) -> str:
    """Returns what a string probably means, in the form of the grammar; it may still be invalid.

    It reads other separators than commas, ":" for "=", mappings of YAML and of Python, settings
    before the name, and values without their key.

    Args:
        text: The string.
        keys: The fields of a policy, by the keys of the grammar.
        values: The words that may stand without their key, by what is written before "=" or whole.
    """
    names = "|".join(sorted(keys, key=len, reverse=True))
    key = rf"(?:^|[\s;,|&/+:]+)['\"]?({names})['\"]?\s*(?:==|:=|[=:])"
    head, *rest = re.split(key, text.strip("{} \n"), flags=re.IGNORECASE)
    words = _words(re.sub(r"^\s*['\"]?(?:policy|name)['\"]?\s*[:=]", "", head))
    settings = []
    for name, value in zip(rest[::2], rest[1::2], strict=True):
        field = keys[name.lower()]
        if field == _MAPPING or field in _LISTS:
            settings.append(f"{name}={as_json(value, field == _MAPPING)}")
        else:
            first, *more = _words(value) or [""]
            settings.append(f"{name}={first}")
            words += more
    for word in words[:]:
        asked = [name for name, choices in values.items() if word.lower() in choices]
        if len(asked) == 1:
            words.remove(word)
            settings.append(asked[0] if "=" in asked[0] else f"{asked[0]}={word}")
    return ",".join((*words, *settings))


def _words(text: str) -> list[str]:
    return [w.strip("'\"") for w in re.split(_SEPARATORS, text.strip(_AROUND)) if w]


def as_json(text: str, mapping: bool) -> str:
    """Returns a mapping or a list as JSON, however it is written."""
    inside = text.strip(_AROUND.replace("/", "")).strip("{}[] \n")
    items = [item.strip() for item in re.split(r"[,;\n]", inside) if item.strip(" \t-")]
    if not mapping:
        return json.dumps([item.strip("'\" -") for item in items])
    pairs = (re.split(r"\s*(?:=>|[:=])\s*(?=[^:=]*$)", item) for item in items)
    return json.dumps({p[0].strip("'\" "): p[-1].strip("'\" ") for p in pairs})
