"""Join the rows that workers sent to one record for each response, and decode its tokens."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlgraph.analysis.samples import FIELDS, Sample
from rlgraph.columns import FINISH_REASONS
from rlgraph.runtime.messages import Cells, SampledRows, SampleSource

DIGITS = 5  # of a number of each token
BROKEN = "\ufffd"  # what a decoder gives for part of a character
OWN = (  # columns with a field of their own
    *("prompts", "prompt_mask", "responses", "response_mask", "rollout_log_probs", "weight_version", "finish_reasons", "group_ids"),
    *("old_log_probs", "advantages", "loss_mask", "rewards", "token_rewards", "prompt_texts", "prompt_ids"),
)


class TokenTexts:
    """The texts of token ids, one for each token; it remembers what it has decoded."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]  # some decoders drop the space before a first token

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to a text, special tokens included."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Give each token its text. A character of several tokens stands at the first of them, and the others are empty."""
        found = [self._text(token) for token in ids]
        place = 0
        while place < len(found):
            end = place
            while end < len(found) and (BROKEN in found[end] or (end > place and not found[end])):
                end += 1
            if end > place:
                found[place:end] = [self.decode(ids[place:end]), *[""] * (end - place - 1)]
            place = end + 1
        return found

    def _text(self, token: int) -> str:
        if token not in self._texts:
            before = self.decode(self._anchor)
            self._texts[token] = self.decode([*self._anchor, token])[len(before) :]
        return self._texts[token]


def records(
    step: int, messages: Sequence[SampledRows], sources: Sequence[SampleSource], decoders: Mapping[str, TokenTexts]
) -> list[Sample]:
    """Make a record for each response of a step whose rows are there, in the order of the batch."""
    order = {(source.node, source.rollout): (place, source.repeat) for place, source in enumerate(sources)}
    found: dict[tuple[str, int], dict[str, Any]] = {}
    nodes = {source.rollout for source in sources}
    kinds = {source.rollout: source.kind for source in sources}
    by_rollout = sorted(messages, key=lambda rows: order[rows.node, rows.rollout][0])
    for rows in (rows for rows in by_rollout if rows.node in nodes):
        for row, values in zip(rows.rows, _rows_of(rows.columns), strict=True):
            found.setdefault((rows.rollout, row), {}).update(values)
    for rows in (rows for rows in by_rollout if rows.node not in nodes):
        repeat = order[rows.node, rows.rollout][1]
        for number, values in zip(rows.rows, _rows_of(rows.columns), strict=True):
            for row in range(number * repeat, (number + 1) * repeat):
                if (rows.rollout, row) in found:
                    _add(found[rows.rollout, row], rows.node, values)
    return [
        {"step": step, "kind": kinds[rollout], **_record(rollout, row, found[rollout, row], decoders.get(rollout))}
        for rollout, row in sorted(found)
    ]


def _add(record: dict[str, Any], node: str, values: Mapping[str, Any]) -> None:
    """Add a node's values; one that another node wrote before it is kept under that node's name."""
    writers = record.setdefault("", {})
    for name, value in values.items():
        if name in record and name in writers:
            record[f"{writers[name]}/{name}"] = record[name]
        record[name], writers[name] = value, node


def _rows_of(columns: Mapping[str, Cells]) -> Iterator[dict[str, Any]]:
    """Yield the values of each row."""
    arrays = {
        name: cells.text if cells.dtype == "text" else np.frombuffer(cells.data, cells.dtype).reshape(cells.shape)
        for name, cells in columns.items()
    }
    count = len(next(iter(arrays.values()), ()))
    for row in range(count):
        yield {name: array[row] for name, array in arrays.items()}


def _record(rollout: str, row: int, values: Mapping[str, Any], decoder: TokenTexts | None) -> Sample:
    mask, tokens = values["response_mask"], values.get("responses")
    written = mask if tokens is None else mask | (tokens != 0)
    length = int(np.flatnonzero(written)[-1]) + 1 if written.any() else 0
    policy = mask[:length]
    ids = [] if tokens is None else tokens[:length].tolist()
    prompt_mask = values.get("prompt_mask")
    prompt_ids = values["prompts"][prompt_mask].tolist() if prompt_mask is not None else []
    versions = values["weight_version"][:length] if "weight_version" in values else np.zeros(0, np.int32)
    advantages = _tokens(values, "advantages", length)
    sampled, trained = _tokens(values, "rollout_log_probs", length), _tokens(values, "old_log_probs", length)
    diffs = [new - old for new, old in zip(trained, sampled, strict=True)] if trained and sampled else []
    others = {name: _plain(value) for name, value in values.items() if name and name not in OWN}
    record = {
        "rollout": rollout,
        "row": row,
        "group": int(values["group_ids"]) if "group_ids" in values else row,
        "prompt": decoder.decode(prompt_ids) if decoder and prompt_ids else str(values.get("prompt_texts", "")),
        "response": decoder.decode(ids) if decoder else "",
        "reward": _plain(values["rewards"]) if "rewards" in values else None,
        "advantage": _mean(advantages, policy),
        "finish": FINISH_REASONS[int(values["finish_reasons"])] if "finish_reasons" in values else "",
        "prompt_tokens": len(prompt_ids),
        "response_tokens": int(policy.sum()),
        "version_min": int(versions[policy].min()) if len(versions) and policy.any() else 0,
        "version_max": int(versions[policy].max()) if len(versions) and policy.any() else 0,
        "log_prob_diff": _mean(diffs, policy),
        "columns": others,
        "token_texts": decoder.texts(ids) if decoder else [],
        "token_ids": ids,
        "token_policy": policy.astype(int).tolist(),
        "token_trained": values["loss_mask"][:length].astype(int).tolist() if "loss_mask" in values else [],
        "token_rewards": _short(_tokens(values, "token_rewards", length)),
        "token_advantages": _short(advantages),
        "token_versions": versions.tolist(),
        "token_log_probs": _short(sampled),
        "token_log_prob_diffs": _short(diffs),
    }
    assert record.keys() == FIELDS.keys() - {"step", "kind"}
    return record


def _tokens(values: Mapping[str, Any], name: str, length: int) -> list[float]:
    column = values.get(name)
    return [] if column is None or len(column) < length else column[:length].tolist()


def _mean(numbers: Sequence[float], policy: Any) -> float | None:
    return _plain(float(np.asarray(numbers)[policy].mean())) if len(numbers) and policy.any() else None


def _short(numbers: Sequence[float]) -> list[float | None]:
    return [float(f"{number:.{DIGITS}g}") if math.isfinite(number) else None for number in numbers]


def _plain(value: Any) -> Any:
    """Convert a number of numpy to Python's; JSON has no NaN, so one that is not finite becomes None."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
