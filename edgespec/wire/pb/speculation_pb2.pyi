from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ConstraintKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONSTRAINT_KIND_UNSPECIFIED: _ClassVar[ConstraintKind]
    CONSTRAINT_KIND_JSON_SCHEMA: _ClassVar[ConstraintKind]
    CONSTRAINT_KIND_GRAMMAR: _ClassVar[ConstraintKind]
    CONSTRAINT_KIND_REGEX: _ClassVar[ConstraintKind]
    CONSTRAINT_KIND_TOKENS: _ClassVar[ConstraintKind]

class RunAhead(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_AHEAD_UNSPECIFIED: _ClassVar[RunAhead]
    RUN_AHEAD_AUTO: _ClassVar[RunAhead]
    RUN_AHEAD_ALWAYS: _ClassVar[RunAhead]
    RUN_AHEAD_NEVER: _ClassVar[RunAhead]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]

class FaultCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAULT_CODE_UNSPECIFIED: _ClassVar[FaultCode]
    FAULT_CODE_RESYNC: _ClassVar[FaultCode]
    FAULT_CODE_INVALID: _ClassVar[FaultCode]
    FAULT_CODE_UNKNOWN_MODEL: _ClassVar[FaultCode]
    FAULT_CODE_VOCABULARY_MISMATCH: _ClassVar[FaultCode]
    FAULT_CODE_CONTEXT_TOO_LONG: _ClassVar[FaultCode]
    FAULT_CODE_OVERLOADED: _ClassVar[FaultCode]
    FAULT_CODE_SHUTTING_DOWN: _ClassVar[FaultCode]
    FAULT_CODE_INTERNAL: _ClassVar[FaultCode]
    FAULT_CODE_UNAUTHENTICATED: _ClassVar[FaultCode]

class TokenizerArchive(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOKENIZER_ARCHIVE_UNSPECIFIED: _ClassVar[TokenizerArchive]
    TOKENIZER_ARCHIVE_TEXTS: _ClassVar[TokenizerArchive]
    TOKENIZER_ARCHIVE_FACTS: _ClassVar[TokenizerArchive]
CONSTRAINT_KIND_UNSPECIFIED: ConstraintKind
CONSTRAINT_KIND_JSON_SCHEMA: ConstraintKind
CONSTRAINT_KIND_GRAMMAR: ConstraintKind
CONSTRAINT_KIND_REGEX: ConstraintKind
CONSTRAINT_KIND_TOKENS: ConstraintKind
RUN_AHEAD_UNSPECIFIED: RunAhead
RUN_AHEAD_AUTO: RunAhead
RUN_AHEAD_ALWAYS: RunAhead
RUN_AHEAD_NEVER: RunAhead
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FAULT_CODE_UNSPECIFIED: FaultCode
FAULT_CODE_RESYNC: FaultCode
FAULT_CODE_INVALID: FaultCode
FAULT_CODE_UNKNOWN_MODEL: FaultCode
FAULT_CODE_VOCABULARY_MISMATCH: FaultCode
FAULT_CODE_CONTEXT_TOO_LONG: FaultCode
FAULT_CODE_OVERLOADED: FaultCode
FAULT_CODE_SHUTTING_DOWN: FaultCode
FAULT_CODE_INTERNAL: FaultCode
FAULT_CODE_UNAUTHENTICATED: FaultCode
TOKENIZER_ARCHIVE_UNSPECIFIED: TokenizerArchive
TOKENIZER_ARCHIVE_TEXTS: TokenizerArchive
TOKENIZER_ARCHIVE_FACTS: TokenizerArchive

class DeviceMessage(_message.Message):
    __slots__ = ("draft", "received", "cancel", "open", "prefix_tokens", "picture_part")
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PICTURE_PART_FIELD_NUMBER: _ClassVar[int]
    draft: Draft
    received: Received
    cancel: Cancel
    open: Open
    prefix_tokens: PrefixTokens
    picture_part: PicturePart
    def __init__(self, draft: _Optional[_Union[Draft, _Mapping]] = ..., received: _Optional[_Union[Received, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., prefix_tokens: _Optional[_Union[PrefixTokens, _Mapping]] = ..., picture_part: _Optional[_Union[PicturePart, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("version", "session_id", "model", "vocabulary", "prompt", "committed", "sampling", "run_ahead", "rule", "drafting", "session_secret", "logprobs", "plain", "prefix_key", "prefix", "media")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    RUN_AHEAD_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    SESSION_SECRET_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_FIELD_NUMBER: _ClassVar[int]
    PREFIX_KEY_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    version: int
    session_id: str
    model: str
    vocabulary: str
    prompt: _containers.RepeatedScalarFieldContainer[int]
    committed: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    run_ahead: RunAhead
    rule: str
    drafting: bool
    session_secret: bytes
    logprobs: int
    plain: bool
    prefix_key: bytes
    prefix: Prefix
    media: Media
    def __init__(self, version: _Optional[int] = ..., session_id: _Optional[str] = ..., model: _Optional[str] = ..., vocabulary: _Optional[str] = ..., prompt: _Optional[_Iterable[int]] = ..., committed: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., run_ahead: _Optional[_Union[RunAhead, str]] = ..., rule: _Optional[str] = ..., drafting: bool = ..., session_secret: _Optional[bytes] = ..., logprobs: _Optional[int] = ..., plain: bool = ..., prefix_key: _Optional[bytes] = ..., prefix: _Optional[_Union[Prefix, _Mapping]] = ..., media: _Optional[_Union[Media, _Mapping]] = ...) -> None: ...

class Media(_message.Message):
    __slots__ = ("pictures", "prompt", "committed", "prefix")
    PICTURES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    pictures: _containers.RepeatedCompositeFieldContainer[Picture]
    prompt: _containers.RepeatedScalarFieldContainer[int]
    committed: _containers.RepeatedScalarFieldContainer[int]
    prefix: Prefix
    def __init__(self, pictures: _Optional[_Iterable[_Union[Picture, _Mapping]]] = ..., prompt: _Optional[_Iterable[int]] = ..., committed: _Optional[_Iterable[int]] = ..., prefix: _Optional[_Union[Prefix, _Mapping]] = ...) -> None: ...

class Picture(_message.Message):
    __slots__ = ("sha256", "bytes", "position")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    bytes: int
    position: int
    def __init__(self, sha256: _Optional[bytes] = ..., bytes: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class PicturePart(_message.Message):
    __slots__ = ("number", "offset", "data")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    number: int
    offset: int
    data: bytes
    def __init__(self, number: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Prefix(_message.Message):
    __slots__ = ("length", "name", "prompt_length", "prompt", "committed")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    length: int
    name: bytes
    prompt_length: int
    prompt: _containers.RepeatedScalarFieldContainer[int]
    committed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, length: _Optional[int] = ..., name: _Optional[bytes] = ..., prompt_length: _Optional[int] = ..., prompt: _Optional[_Iterable[int]] = ..., committed: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefixTokens(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop_token_ids", "max_tokens", "ignore_eos", "constraint", "min_tokens")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    ignore_eos: bool
    constraint: Constraint
    min_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., ignore_eos: bool = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., min_tokens: _Optional[int] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: ConstraintKind
    text: str
    def __init__(self, kind: _Optional[_Union[ConstraintKind, str]] = ..., text: _Optional[str] = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("first_node_id", "tokens", "parent_deltas", "base_position", "base_hash")
    FIRST_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENT_DELTAS_FIELD_NUMBER: _ClassVar[int]
    BASE_POSITION_FIELD_NUMBER: _ClassVar[int]
    BASE_HASH_FIELD_NUMBER: _ClassVar[int]
    first_node_id: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parent_deltas: _containers.RepeatedScalarFieldContainer[int]
    base_position: int
    base_hash: int
    def __init__(self, first_node_id: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., parent_deltas: _Optional[_Iterable[int]] = ..., base_position: _Optional[int] = ..., base_hash: _Optional[int] = ...) -> None: ...

class Received(_message.Message):
    __slots__ = ("position", "echo")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    position: int
    echo: int
    def __init__(self, position: _Optional[int] = ..., echo: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifierMessage(_message.Message):
    __slots__ = ("commit", "opened", "fault", "prefix_missing", "pictures_missing")
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_MISSING_FIELD_NUMBER: _ClassVar[int]
    PICTURES_MISSING_FIELD_NUMBER: _ClassVar[int]
    commit: Commit
    opened: Opened
    fault: Fault
    prefix_missing: PrefixMissing
    pictures_missing: PicturesMissing
    def __init__(self, commit: _Optional[_Union[Commit, _Mapping]] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ..., prefix_missing: _Optional[_Union[PrefixMissing, _Mapping]] = ..., pictures_missing: _Optional[_Union[PicturesMissing, _Mapping]] = ...) -> None: ...

class PrefixMissing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PicturesMissing(_message.Message):
    __slots__ = ("numbers",)
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, numbers: _Optional[_Iterable[int]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("limits", "model", "position", "fingerprint", "constrained", "min_tokens", "prefix_block", "picture_tokens")
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINED_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_BLOCK_FIELD_NUMBER: _ClassVar[int]
    PICTURE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    limits: Limits
    model: str
    position: int
    fingerprint: str
    constrained: bool
    min_tokens: int
    prefix_block: int
    picture_tokens: int
    def __init__(self, limits: _Optional[_Union[Limits, _Mapping]] = ..., model: _Optional[str] = ..., position: _Optional[int] = ..., fingerprint: _Optional[str] = ..., constrained: bool = ..., min_tokens: _Optional[int] = ..., prefix_block: _Optional[int] = ..., picture_tokens: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("context_length", "max_nodes_outstanding", "max_nodes_per_pass", "max_unreceived", "lease_s")
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_PER_PASS_FIELD_NUMBER: _ClassVar[int]
    MAX_UNRECEIVED_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    context_length: int
    max_nodes_outstanding: int
    max_nodes_per_pass: int
    max_unreceived: int
    lease_s: float
    def __init__(self, context_length: _Optional[int] = ..., max_nodes_outstanding: _Optional[int] = ..., max_nodes_per_pass: _Optional[int] = ..., max_unreceived: _Optional[int] = ..., lease_s: _Optional[float] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("position", "tokens", "accepted", "stale", "queue_us", "verify_us", "rows", "echo", "held_us", "finish", "row_price", "credit", "replaced", "logprobs", "read")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    VERIFY_US_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    HELD_US_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ROW_PRICE_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    position: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    accepted: int
    stale: int
    queue_us: int
    verify_us: int
    rows: int
    echo: int
    held_us: int
    finish: FinishReason
    row_price: int
    credit: int
    replaced: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenScore]
    read: int
    def __init__(self, position: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., accepted: _Optional[int] = ..., stale: _Optional[int] = ..., queue_us: _Optional[int] = ..., verify_us: _Optional[int] = ..., rows: _Optional[int] = ..., echo: _Optional[int] = ..., held_us: _Optional[int] = ..., finish: _Optional[_Union[FinishReason, str]] = ..., row_price: _Optional[int] = ..., credit: _Optional[int] = ..., replaced: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenScore, _Mapping]]] = ..., read: _Optional[int] = ...) -> None: ...

class TokenScore(_message.Message):
    __slots__ = ("logprob", "margin", "tokens", "logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    MARGIN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    margin: float
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., margin: _Optional[float] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("code", "message", "retry_after_s")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    code: FaultCode
    message: str
    retry_after_s: float
    def __init__(self, code: _Optional[_Union[FaultCode, str]] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoReply(_message.Message):
    __slots__ = ("model", "protocol_version", "limits", "sessions", "max_sessions", "pass_us", "adapters", "drafts")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PASS_US_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    model: ModelInfo
    protocol_version: int
    limits: Limits
    sessions: int
    max_sessions: int
    pass_us: int
    adapters: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    drafts: DraftTotals
    def __init__(self, model: _Optional[_Union[ModelInfo, _Mapping]] = ..., protocol_version: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., sessions: _Optional[int] = ..., max_sessions: _Optional[int] = ..., pass_us: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ..., drafts: _Optional[_Union[DraftTotals, _Mapping]] = ...) -> None: ...

class DraftTotals(_message.Message):
    __slots__ = ("device_nodes", "device_accepted", "model_nodes", "model_accepted", "text_nodes", "text_accepted", "model_steps", "model_us", "model_failures")
    DEVICE_NODES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    MODEL_NODES_FIELD_NUMBER: _ClassVar[int]
    MODEL_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TEXT_NODES_FIELD_NUMBER: _ClassVar[int]
    TEXT_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    MODEL_STEPS_FIELD_NUMBER: _ClassVar[int]
    MODEL_US_FIELD_NUMBER: _ClassVar[int]
    MODEL_FAILURES_FIELD_NUMBER: _ClassVar[int]
    device_nodes: int
    device_accepted: int
    model_nodes: int
    model_accepted: int
    text_nodes: int
    text_accepted: int
    model_steps: int
    model_us: int
    model_failures: int
    def __init__(self, device_nodes: _Optional[int] = ..., device_accepted: _Optional[int] = ..., model_nodes: _Optional[int] = ..., model_accepted: _Optional[int] = ..., text_nodes: _Optional[int] = ..., text_accepted: _Optional[int] = ..., model_steps: _Optional[int] = ..., model_us: _Optional[int] = ..., model_failures: _Optional[int] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "vocabulary", "vocabulary_size", "context_length", "eos_token_ids", "fingerprint", "pictures")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PICTURES_FIELD_NUMBER: _ClassVar[int]
    name: str
    vocabulary: str
    vocabulary_size: int
    context_length: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    fingerprint: str
    pictures: PictureInput
    def __init__(self, name: _Optional[str] = ..., vocabulary: _Optional[str] = ..., vocabulary_size: _Optional[int] = ..., context_length: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., fingerprint: _Optional[str] = ..., pictures: _Optional[_Union[PictureInput, _Mapping]] = ...) -> None: ...

class PictureInput(_message.Message):
    __slots__ = ("token", "max_count", "max_bytes", "max_pixels")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    MAX_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    token: int
    max_count: int
    max_bytes: int
    max_pixels: int
    def __init__(self, token: _Optional[int] = ..., max_count: _Optional[int] = ..., max_bytes: _Optional[int] = ..., max_pixels: _Optional[int] = ...) -> None: ...

class TokenizerRequest(_message.Message):
    __slots__ = ("sha256", "offset", "part_of")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PART_OF_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    offset: int
    part_of: TokenizerArchive
    def __init__(self, sha256: _Optional[bytes] = ..., offset: _Optional[int] = ..., part_of: _Optional[_Union[TokenizerArchive, str]] = ...) -> None: ...

class TokenizerReply(_message.Message):
    __slots__ = ("sha256", "bytes", "data", "tokenizer_sha256", "facts_sha256", "facts_bytes")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    FACTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    FACTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    bytes: int
    data: bytes
    tokenizer_sha256: bytes
    facts_sha256: bytes
    facts_bytes: int
    def __init__(self, sha256: _Optional[bytes] = ..., bytes: _Optional[int] = ..., data: _Optional[bytes] = ..., tokenizer_sha256: _Optional[bytes] = ..., facts_sha256: _Optional[bytes] = ..., facts_bytes: _Optional[int] = ...) -> None: ...
