"""The client half: a trained model stays on the device, and its change leaves it masked only."""

from __future__ import annotations

import secrets

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from raceme.core import messages as names
from raceme.core.messages import ModelSpec, from_array, to_array
from raceme.features.secure import Options
from raceme.features.secure.protocol import (
    ANSWERED,
    KEY_BYTES,
    KEYS,
    MASKED,
    MISSING,
    POSITION,
    SECURE,
    SHARES,
    STAGE,
    UNMASK,
    WEIGHT,
    Bytes,
    ProtocolError,
    Scale,
    common_key,
    common_masks,
    mask,
    new_private_key,
    public_key,
    quantized,
    shares_of,
    threshold,
)
from raceme.flower.messages import array_record
from raceme.flower.secure_sums import (
    decrypt,
    encrypt,
    share_keys_plaintext_concat,
    share_keys_plaintext_separate,
)

_CHANGE, _SECRETS = "secure-change", "secure-secrets"
"""Records of a client's state: the change of the model that is to be summed, and its secrets."""
_MASK_KEY, _SHARE_KEY, _SEED = "mask-key", "share-key", "seed"
_PUBLIC, _OWN, _STAGE = "public", "own", "stage"


def work(
    message: Message, context: Context, call_next: ClientAppCallable, options: Options
) -> Message:
    """Keep a trained model back and announce it with public keys, or answer a stage's request."""
    asked = message.content.config_records.get(names.CONFIG, ConfigRecord())
    if asked.get(names.KIND) == SECURE:
        answer = _answer(message, asked, context, options)
        told = ConfigRecord({name: asked[name] for name in (names.KIND, names.TASK)})
        content = RecordDict({names.METRICS: MetricRecord(), names.CONFIG: told})
        content[names.NUMBERS] = array_record({str(asked[STAGE]): to_array(answer)})
        return Message(content, reply_to=message)
    reply = call_next(message, context)
    model = reply.content.array_records.get(names.ARRAYS) if not reply.has_error() else None
    if model is None:
        return reply
    spec = ModelSpec.of(model)
    change = spec.unpack(model) - spec.unpack(message.content.array_records[names.ARRAYS])
    context.state[_CHANGE] = array_record({_CHANGE: to_array(change)})
    numbers = dict(reply.content.array_records.get(names.NUMBERS, {}))
    numbers[KEYS] = to_array(_new_keys(context))
    del reply.content[names.ARRAYS]
    reply.content[names.NUMBERS] = array_record(numbers)
    return reply


def _answer(message: Message, asked: ConfigRecord, context: Context, options: Options) -> Bytes:
    """Return the member's part in a stage.

    Raises
    ------
    ProtocolError
        The server asks for what would reveal more than a sum.
    """
    stage = asked[STAGE]
    if _CHANGE not in context.state:
        raise ProtocolError("there is no update to sum")
    if stage == KEYS:
        return _new_keys(context)
    kept = context.state.config_records[_SECRETS]
    # In order, and each once: a second answer to other members' failures reveals both secrets.
    if (kept[_STAGE], stage) not in ((KEYS, SHARES), (SHARES, MASKED), (MASKED, UNMASK)):
        raise ProtocolError(f"{stage} does not follow {kept[_STAGE]}")
    kept[_STAGE] = stage
    if stage == UNMASK:
        return _revealed(asked, kept, context)
    arrays = message.content.array_records[stage]
    received = np.asarray(from_array(arrays[stage]), np.uint8)
    if stage == SHARES:
        return _encrypted(received, asked, kept, options)
    return _masked(received, asked, kept, context, options)


def _new_keys(context: Context) -> Bytes:
    """Begin anew with fresh secrets; return the public keys."""
    own = {_MASK_KEY: new_private_key(), _SHARE_KEY: new_private_key()}
    context.state[_SECRETS] = ConfigRecord({**own, _SEED: secrets.token_bytes(32), _STAGE: KEYS})
    return np.frombuffer(public_key(own[_MASK_KEY]) + public_key(own[_SHARE_KEY]), np.uint8)


def _encrypted(keys: Bytes, asked: ConfigRecord, kept: ConfigRecord, options: Options) -> Bytes:
    """Return shares of both secrets for each other member, encrypted; a row for each position."""
    members, own = len(keys), int(asked[POSITION])
    public = [row.tobytes() for row in keys]
    if members < options.secure_least:
        raise ProtocolError(f"a cohort of {members} members, not of {options.secure_least}")
    parts = {part for both in public for part in (both[:KEY_BYTES], both[KEY_BYTES:])}
    if len(parts) < 2 * members:
        raise ProtocolError("two members have one key")
    mine = public_key(kept[_MASK_KEY]) + public_key(kept[_SHARE_KEY])
    if not 0 <= own < members or public[own] != mine:
        raise ProtocolError("the member's own keys are missing")
    seeds = shares_of(kept[_SEED], members)
    keys_split = shares_of(kept[_MASK_KEY], members)
    kept[_PUBLIC], kept[POSITION] = public, own
    kept[_OWN] = [seeds[own], keys_split[own]]
    rows = {
        position: encrypt(
            common_key(kept[_SHARE_KEY], public[position][KEY_BYTES:]),
            share_keys_plaintext_concat(own, position, seeds[position], keys_split[position]),
        )
        for position in range(members)
        if position != own
    }
    empty = bytes(len(next(iter(rows.values()))))
    whole = b"".join(rows.get(position, empty) for position in range(members))
    return np.frombuffer(whole, np.uint8).reshape(members, -1)


def _masked(
    received: Bytes, asked: ConfigRecord, kept: ConfigRecord, context: Context, options: Options
) -> Bytes:
    """Take the others' shares; return the weighted change with all masks."""
    own, public = kept[POSITION], kept[_PUBLIC]
    others, weight = list(asked[ANSWERED]), float(asked[WEIGHT])
    if len(others) != len(received) or len(set(others)) + 1 < threshold(len(public)):
        raise ProtocolError(f"shares of {len(others)} other members are too few")
    if own in others or not 0 < weight <= 1:
        raise ProtocolError("the weight or the members are impossible")
    shares = []
    for position, row in zip(others, received, strict=True):
        key = common_key(kept[_SHARE_KEY], public[position][KEY_BYTES:])
        sender, receiver, *both = share_keys_plaintext_separate(decrypt(key, row.tobytes()))
        if (sender, receiver) != (position, own):
            raise ProtocolError("shares of another member")
        shares += both
    kept[ANSWERED], kept[SHARES] = others, shares
    change = np.asarray(from_array(context.state.array_records[_CHANGE][_CHANGE]))
    total = quantized(change, weight, Scale(options.secure_range, options.secure_most))
    total += mask(kept[_SEED], len(change))
    keys = {position: public[position][:KEY_BYTES] for position in others}
    return total + common_masks(kept[_MASK_KEY], own, keys, len(change))


def _revealed(asked: ConfigRecord, kept: ConfigRecord, context: Context) -> Bytes:
    """Return shares of the seeds of members that answered, and of the keys of the others.

    Never both of a member, which would reveal its update.
    """
    answered, missing = list(asked[ANSWERED]), list(asked[MISSING])
    own, others = kept[POSITION], kept[ANSWERED]
    if sorted([*answered, *missing]) != sorted([own, *others]) or own not in answered:
        raise ProtocolError("other members than those whose masks were added")
    if len(answered) < threshold(len(kept[_PUBLIC])):
        raise ProtocolError(f"a sum of {len(answered)} updates is too small")
    shares = {own: kept[_OWN]}
    shares |= {who: kept[SHARES][2 * at : 2 * at + 2] for at, who in enumerate(others)}
    del context.state[_CHANGE]
    found = [shares[who][0] for who in answered] + [shares[who][1] for who in missing]
    return np.frombuffer(b"".join(found), np.uint8).reshape(len(found), -1)
