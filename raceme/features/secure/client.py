"""The client half: a trained model stays on the device, and its change leaves it masked only."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from numpy.typing import NDArray

from raceme.core import messages as names
from raceme.core.messages import ModelSpec, from_array, to_array
from raceme.core.sketches import Sketcher
from raceme.features.secure import Options
from raceme.features.secure.protocol import (
    ANSWERED,
    KEY_BYTES,
    KEYS,
    MASKED,
    MISSING,
    NEXT,
    POSITION,
    SECURE,
    SHARES,
    STAGE,
    TOKEN_BYTES,
    WEIGHT,
    Bytes,
    Masked,
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


def work(
    message: Message, context: Context, call_next: ClientAppCallable, options: Options
) -> Message:
    """Keep a trained model back and announce it with public keys, or answer a stage's request."""
    asked = message.content.config_records.get(names.CONFIG, ConfigRecord())
    if asked.get(names.KIND) == SECURE:
        return _stage(message, dict(asked), context, options)
    reply = call_next(message, context)
    model = reply.content.array_records.get(names.ARRAYS) if not reply.has_error() else None
    if model is None:
        return reply
    spec = ModelSpec.of(model)
    change = spec.unpack(model) - spec.unpack(message.content.array_records[names.ARRAYS])
    numbers = dict(reply.content.array_records.get(names.NUMBERS, {}))
    if size := asked.get(names.SKETCH):
        # One with noise has been made.
        if names.SKETCH not in numbers:
            direction = Sketcher(int(size)).direction(spec.compared(change))  # type: ignore[arg-type]
            numbers[names.SKETCH] = to_array(direction)
    else:
        own = Secrets.new()
        context.state[_SECRETS] = own.record()
        context.state[_CHANGE] = array_record({_CHANGE: to_array(change)})
        numbers[KEYS] = to_array(own.public)
    del reply.content[names.ARRAYS]
    reply.content[names.NUMBERS] = array_record(numbers)
    return reply


@dataclass
class Secrets:
    """What a member keeps to itself, from its keys to the end of a cohort.

    Attributes
    ----------
    mask_key, share_key : bytes
        Private keys: of the masks that it has in common with others, and of encrypted shares.
    seed : bytes
        Seed of its own mask.
    stage : str
        The last stage that it has answered.
    position : int
        Its position in the cohort.
    keys : list[bytes]
        All members' public keys, by position.
    senders : list[int]
        Members whose shares it has, itself first.
    seed_shares, key_shares : list[bytes]
        Their shares of the seeds and of the private keys of masks.
    """

    mask_key: bytes
    share_key: bytes
    seed: bytes
    stage: str = KEYS
    position: int = 0
    keys: list[bytes] = field(default_factory=list)
    senders: list[int] = field(default_factory=list)
    seed_shares: list[bytes] = field(default_factory=list)
    key_shares: list[bytes] = field(default_factory=list)

    @classmethod
    def new(cls) -> Self:
        """Return fresh secrets of the operating system's randomness."""
        return cls(new_private_key(), new_private_key(), secrets.token_bytes(32))

    @classmethod
    def of(cls, record: ConfigRecord) -> Self:
        """Return the secrets of a record of a client's state."""
        values: dict[str, Any] = dict(record)
        return cls(**values)

    def record(self) -> ConfigRecord:
        """Return the secrets as a record of a client's state."""
        return ConfigRecord(dict(vars(self)))

    @property
    def public(self) -> Bytes:
        """The public keys, one after the other."""
        both = public_key(self.mask_key) + public_key(self.share_key)
        return np.frombuffer(both, np.uint8)

    def common_key(self, position: int) -> bytes:
        """Return the key of shares for or from another member."""
        return common_key(self.share_key, self.keys[position][KEY_BYTES:])

    # The stages.

    def encrypted_shares(self, keys: Bytes, position: int, least: int) -> Bytes:
        """Return shares of both secrets for each other member, encrypted; a row for each."""
        members = len(keys)
        self.keys, self.position = [row.tobytes() for row in keys], position
        parts = {part for both in self.keys for part in (both[:KEY_BYTES], both[KEY_BYTES:])}
        if members < least:
            raise ProtocolError(f"a cohort of {members} members, not of {least}")
        if len(parts) < 2 * members:
            raise ProtocolError("two members have one key")
        if not 0 <= position < members or self.keys[position] != self.public.tobytes():
            raise ProtocolError("the member's own keys are missing")
        seeds, masks = shares_of(self.seed, members), shares_of(self.mask_key, members)
        self.senders = [position]
        self.seed_shares, self.key_shares = [seeds[position]], [masks[position]]
        rows = np.zeros((members, TOKEN_BYTES), np.uint8)
        for other, shares in enumerate(zip(seeds, masks, strict=True)):
            if other != position:
                plain = share_keys_plaintext_concat(position, other, *shares)
                rows[other] = np.frombuffer(encrypt(self.common_key(other), plain), np.uint8)
        return rows

    def take_shares(self, rows: Bytes, senders: list[int]) -> None:
        """Keep the other members' shares."""
        if len(rows) != len(senders) or len({self.position, *senders}) != len(senders) + 1:
            raise ProtocolError("shares of impossible members")
        if len(senders) + 1 < threshold(len(self.keys)):
            raise ProtocolError(f"shares of {len(senders)} other members are too few")
        for position, row in zip(senders, rows, strict=True):
            plain = decrypt(self.common_key(position), row.tobytes())
            sender, receiver, seed_share, key_share = share_keys_plaintext_separate(plain)
            if (sender, receiver) != (position, self.position):
                raise ProtocolError("shares of another member")
            self.senders.append(position)
            self.seed_shares.append(seed_share)
            self.key_shares.append(key_share)

    def masks(self, size: int) -> Masked:
        """Return the sum of the member's own mask and those that it has in common with others."""
        others = {other: self.keys[other][:KEY_BYTES] for other in self.senders[1:]}
        common = common_masks(self.mask_key, self.position, others, size)
        return common + mask(self.seed, size)

    def revealed(self, answered: list[int], missing: list[int]) -> Bytes:
        """Return shares of the seeds of members that answered, and of the keys of the others.

        Never both of a member, which would reveal its update.
        """
        if sorted([*answered, *missing]) != sorted(self.senders) or self.position in missing:
            raise ProtocolError("other members than those whose masks were added")
        if len(answered) < threshold(len(self.keys)):
            raise ProtocolError(f"a sum of {len(answered)} updates is too small")
        seeds = dict(zip(self.senders, self.seed_shares, strict=True))
        keys = dict(zip(self.senders, self.key_shares, strict=True))
        found = [seeds[position] for position in answered] + [keys[gone] for gone in missing]
        return np.frombuffer(b"".join(found), np.uint8).reshape(len(found), -1)


def _stage(message: Message, asked: dict[str, Any], context: Context, options: Options) -> Message:
    """Return the member's part in a stage.

    Raises
    ------
    ProtocolError
        The server asks for what would reveal more than a sum.
    """
    stage, state = asked[STAGE], context.state
    if _CHANGE not in state:
        raise ProtocolError("there is no update to sum")
    own = Secrets.new() if stage == KEYS else Secrets.of(state.config_records[_SECRETS])
    # In order and each once, as a second answer might reveal a second secret of a member.
    if stage != KEYS and NEXT.get(own.stage) != stage:
        raise ProtocolError(f"{stage} does not follow {own.stage}")
    own.stage = stage
    rows: Bytes = np.empty(0, np.uint8)
    if stage in message.content.array_records:
        rows = np.asarray(from_array(message.content.array_records[stage][stage]), np.uint8)
    part: NDArray[np.generic]
    if stage == KEYS:
        part = own.public
    elif stage == SHARES:
        part = own.encrypted_shares(rows, asked[POSITION], options.secure_least)
    elif stage == MASKED:
        own.take_shares(rows, asked[ANSWERED])
        change = np.asarray(from_array(state.array_records[_CHANGE][_CHANGE]), np.float32)
        if not 0 < asked[WEIGHT] <= 1:
            raise ProtocolError(f"a weight of {asked[WEIGHT]}")
        scale = Scale(options.secure_range, options.secure_most)
        part = quantized(change, asked[WEIGHT], scale) + own.masks(len(change))
    else:
        part = own.revealed(asked[ANSWERED], asked[MISSING])
        # Once it is part of a sum that may become known, it is never part of another.
        del state[_CHANGE]
    state[_SECRETS] = own.record()
    told = ConfigRecord({name: asked[name] for name in (names.KIND, names.TASK)})
    content = RecordDict({names.METRICS: MetricRecord(), names.CONFIG: told})
    content[names.NUMBERS] = array_record({stage: to_array(part)})
    return Message(content, reply_to=message)
