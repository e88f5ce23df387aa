"""Pictures for vLLM: read by the model's own processor, and put where a prompt has placeholders.

The processor replaces each placeholder of a prompt by as many tokens as the picture has rows, and
makes the tensors that vLLM's encoder reads. Outside the engine a picture goes on counting as one
token (``protocol/pictures.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from edgespec.core.protocol.pictures import ReadPictures, read_header
from edgespec.verifier.vllm.target import ExpandedPrompt

_IMAGE: Final = "image"
_PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json")
_PROBE_PIXELS: Final = 64


def has_processor(folder: str) -> bool:
    """Return whether a model's folder has the settings of a processor of pictures."""
    return any((Path(folder) / name).is_file() for name in _PROCESSOR_FILES)


class PictureProcessor:
    """The processor of the model in ``config``, a vLLM ``ModelConfig``.

    ``placeholder`` is the token that stands for a picture; None if no single token does, and then
    ``why`` says so and the model reads no pictures here."""

    def __init__(self, config: Any) -> None:
        from vllm.multimodal import MULTIMODAL_REGISTRY

        self._model_config, self.why = config, ""
        self._processor = MULTIMODAL_REGISTRY.create_processor(config)
        self.placeholder = self._find_placeholder()

    def read(
        self, prompt: Sequence[int], pictures: Sequence[bytes], positions: Sequence[int]
    ) -> ReadPictures:
        """Read the pictures of a prompt, as in ``TargetModel.read_pictures``."""
        names = [sha256(data).hexdigest() for data in pictures]
        found = self._apply(prompt, [self._decode(data) for data in pictures], names)
        tokens, ranges = found["prompt_token_ids"], found["mm_placeholders"].get(_IMAGE, ())
        if len(ranges) != len(pictures):
            raise ValueError(f"the model has places for {len(ranges)} of {len(pictures)} pictures")
        expanded = ExpandedPrompt(
            tokens=tuple(tokens),
            features=_make_features(found),
            positions=tuple(positions),
            ends=tuple([one.offset + one.length for one in ranges]),
            length=len(prompt),
        )
        return ReadPictures(len(tokens) - len(prompt), expanded)

    def _decode(self, data: bytes) -> Any:
        """Return a picture as vLLM's own server reads it. Raises ``ValueError``."""
        from PIL import Image
        from vllm.multimodal.media import ImageMediaIO

        header = read_header(data)
        try:
            # The decoder must agree with the header whose pixels were counted.
            with Image.open(BytesIO(data), formats=(header.format.upper(),)) as picture:
                size = picture.size
        except (OSError, SyntaxError) as error:
            raise ValueError(f"a {header.format} file cannot be decoded: {error}") from None
        if size != (header.width, header.height):
            stated = f"{header.width} x {header.height}"
            raise ValueError(f"its header states {stated} pixels, but it has {size[0]} x {size[1]}")
        options = self._model_config.multimodal_config.media_io_kwargs or {}
        return ImageMediaIO(**options.get(_IMAGE, {})).load_bytes(data)

    def _apply(self, prompt: Sequence[int], pictures: Sequence[Any], names: Sequence[str]) -> Any:
        from vllm.multimodal.parse import parse_mm_uuids
        from vllm.multimodal.processing.context import TimingContext
        from vllm.multimodal.processing.inputs import ProcessorInputs

        items = self._processor.info.parse_mm_data({_IMAGE: list(pictures)})
        inputs = ProcessorInputs(list(prompt), items, parse_mm_uuids({_IMAGE: list(names)}))
        return self._processor.apply(inputs, TimingContext(enabled=False))

    def _find_placeholder(self) -> int | None:
        """Return the token that the processor replaces by a picture. vLLM knows the text that a
        chat has for one, such as ``<|vision_start|><|image_pad|><|vision_end|>``; the token is the
        one of it that works alone, twice for two pictures."""
        from PIL import Image
        from vllm.model_executor.model_loader import get_model_architecture

        architecture, _ = get_model_architecture(self._model_config)
        text = architecture.get_placeholder_str(_IMAGE, 1) or ""
        tokenizer = self._processor.info.get_tokenizer()
        picture = Image.new("RGB", (_PROBE_PIXELS, _PROBE_PIXELS))
        candidates = tokenizer.encode(text, add_special_tokens=False)
        for token in dict.fromkeys(candidates):
            try:
                found = self._apply([token, token], [picture, picture], ["a", "b"])
            except Exception as error:  # a processor may raise anything
                self.why = f"{type(error).__name__}: {error}"
                continue
            if len(found["mm_placeholders"].get(_IMAGE, ())) == 2:
                return int(token)
        self.why = self.why or f"no single token of {text!r} stands for a picture"
        return None


def _make_features(found: Any) -> tuple[Any, ...]:
    """Return vLLM's features of a processed prompt, in the order of their places."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec

    data, names = found["mm_kwargs"][_IMAGE], found["mm_hashes"][_IMAGE]
    return tuple(
        [
            MultiModalFeatureSpec(
                data=data[number],
                modality=_IMAGE,
                identifier=names[number],
                mm_position=place,
                mm_hash=names[number],
            )
            for number, place in enumerate(found["mm_placeholders"][_IMAGE])
        ]
    )
