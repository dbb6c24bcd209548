"""e4m3 weights: checkpoints of compressed-tensors, rounding at load, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from octavo.common.links import Address
from octavo.worker.config import WorkerConfig
from octavo.worker.kv_scales import kv_format
from octavo.worker.loading import load_core
from octavo.worker.models.dummy import make_dummy_decoder
from octavo.worker.models.errors import MissingTensorError, ModelLoadError, UnknownQuantizationError
from octavo.worker.models.fp8_linear import DequantizedLinear, make_fp8_linear, to_rows_of_e4m3
from octavo.worker.models.quantization import Fp8Weights, read_quantization
from octavo.worker.models.weights import load_decoder
from support.runner_driver import RunnerDriver, make_runner
from support.tiny_models import TinyModel, prompt_of

MakeTiny = Callable[[str], TinyModel]
CPU = torch.device("cpu")
E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}
GROUP = {
    "targets": ["Linear"],
    "weights": {**E4M3, "strategy": "channel", "dynamic": False},
    "input_activations": {**E4M3, "strategy": "token", "dynamic": True},
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head"],
}
PROMPT = prompt_of(40)


def is_matrix_of_a_layer(name: str) -> bool:
    return name.startswith("model.layers.") and name.endswith("_proj.weight")


def compress(source: Path, folder: Path, **changes: Any) -> Path:
    """The model as compressed-tensors would store it; matrices named in `ignore` stay as they are."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**COMPRESSED, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if is_matrix_of_a_layer(name)]:
        if name.removesuffix(".weight") not in config["quantization_config"]["ignore"]:
            scale = tensors[name].abs().amax(1, keepdim=True) / 448
            tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors")
    return folder


def change_tensors(folder: Path, **changes: Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def logits_of(folder: Path, **settings: Any) -> Tensor:
    driver = RunnerDriver(make_runner(folder, **settings))
    generation = driver.open(PROMPT, 8)
    driver.generate([generation], 8)
    return torch.stack(generation.logits)


def rounded_reference(model: TinyModel) -> Any:
    """transformers' model, its layers' products computed as e4m3 ones are."""
    import copy

    reference = copy.deepcopy(model.reference)

    def round_rows(x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 448
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    for module in reference.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = round_rows(module.weight.data)
            module.register_forward_pre_hook(lambda _, inputs: (round_rows(inputs[0]),))
    return reference


@pytest.mark.parametrize("name", ["llama", "qwen2", "linear_rope"])
def test_a_compressed_checkpoint_computes_what_its_numbers_say(tiny: MakeTiny, name: str, tmp_path: Path) -> None:
    model = tiny(name)
    found = logits_of(compress(model.folder, tmp_path / "model"))[0]
    with torch.inference_mode():
        expected = rounded_reference(model)(torch.tensor([PROMPT])).logits[0, -1]

    # A sum that differs in its last bit may be rounded to the next of e4m3's numbers; rounding changes ten times more.
    assert (found - expected).norm() / expected.norm() < 0.02


def test_rounding_at_load_gives_the_compressed_checkpoint(tiny: MakeTiny, tmp_path: Path) -> None:
    folder = tiny("llama").folder
    stored = logits_of(compress(folder, tmp_path / "model"))

    assert torch.equal(logits_of(folder, quantize=True), stored)
    assert 1e-3 < (stored[0] - logits_of(folder)[0]).norm() / logits_of(folder)[0].norm() < 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_the_product_of_what_was_rounded(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 64).to(dtype), torch.randn(32, 64), torch.randn(32).to(dtype)
    x[3] *= 1000
    stored, scales = to_rows_of_e4m3(weight)
    residual = torch.randn(5, 32).to(dtype)

    layer = make_fp8_linear(stored, scales, bias, dtype)

    x_stored, x_scales = to_rows_of_e4m3(x)
    exact = (x_stored.double() @ stored.double().t()) * x_scales.double() * scales.t().double() + bias.double()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert (layer(x).double() - exact).norm() / exact.norm() < tolerance
    assert (layer.add_to(residual.clone(), x).double() - exact - residual).norm() / exact.norm() < tolerance
    plain = x.double() @ weight.double().t() + bias
    assert (exact - plain).norm() / plain.norm() < 0.05


def test_rows_are_rounded_by_their_largest_element() -> None:
    stored, scales = to_rows_of_e4m3(torch.tensor([[1.0, -4.48, 0.5], [0.0, 0.0, 0.0]]))

    assert stored.tolist() == [[96.0, -448.0, 48.0], [0.0, 0.0, 0.0]]  # 100 and 50 lie halfway: to even
    assert scales[0].item() == pytest.approx(0.01)


def test_ignored_layers_and_the_output_layer_stay_as_they_are(tiny: MakeTiny, tmp_path: Path) -> None:
    ignored = ["lm_head", "model.layers.1.mlp.down_proj"]
    decoder = load_decoder(compress(tiny("qwen2").folder, tmp_path / "model", ignore=ignored), torch.float32, CPU)

    is_e4m3 = [isinstance(layer.down, DequantizedLinear) for layer in decoder.layers]
    assert is_e4m3 == [True, False, True]
    assert all(isinstance(layer.qkv, DequantizedLinear) for layer in decoder.layers)
    assert not isinstance(decoder.output, DequantizedLinear)


def test_patterns_of_ignored_names() -> None:
    scheme = Fp8Weights(True, ("lm_head", r"re:.*layers\.1\..*", "model.layers.0.self_attn.q_proj"))

    assert not scheme.covers(["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"])
    assert scheme.covers(["model.layers.11.mlp.gate_proj", "model.layers.11.mlp.up_proj"])
    with pytest.raises(UnknownQuantizationError, match="some are quantized and some ignored"):
        scheme.covers(["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method is 'gptq'; only 'compressed-tensors'"),
        ({"format": "pack-quantized"}, "format is 'pack-quantized'; only 'float-quantized'"),
        ({"config_groups": {}}, "does not hold exactly one group"),
        ({"config_groups": {"group_0": {**GROUP, "targets": ["re:.*mlp.*"]}}}, "targets is"),
        ({"config_groups": {"group_0": {**GROUP, "weights": {**GROUP["weights"], "strategy": "block"}}}}, "'block'"),  # type: ignore[dict-item]
        ({"config_groups": {"group_0": {**GROUP, "input_activations": None}}}, "input_activations.num_bits is None"),
        ({"ignore": "lm_head"}, "ignore is not a list of names"),
        ({"ignore": ["re:("]}, "bad pattern"),
        ({"kv_cache_scheme": {**E4M3, "num_bits": 4}}, "kv_cache_scheme.num_bits is 4"),
    ],
)
def test_other_quantizations_are_refused_by_the_setting_at_fault(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownQuantizationError, match=message):
        read_quantization({"quantization_config": {**COMPRESSED, **changes}})


def test_a_quantized_checkpoint_that_is_not_known_is_not_loaded(tiny: MakeTiny, tmp_path: Path) -> None:
    folder = compress(tiny("llama").folder, tmp_path / "model", quant_method="bitsandbytes")
    with pytest.raises(UnknownQuantizationError, match="bitsandbytes"):
        load_decoder(folder, torch.float32, CPU)


def test_missing_scales_and_weights_of_another_type_are_named(tiny: MakeTiny, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    folder = compress(tiny("llama").folder, tmp_path / "model")
    change_tensors(folder, **{name: load_file(folder / "model.safetensors")[name].float()})
    with pytest.raises(ModelLoadError, match=r"up_proj\.weight is stored as float32, which its quantization_config"):
        load_decoder(folder, torch.float32, CPU)
    change_tensors(folder, **{f"{name}_scale": None})
    with pytest.raises(MissingTensorError, match="weight_scale"):
        load_decoder(folder, torch.float32, CPU)


def worker_config(folder: Path, **settings: Any) -> WorkerConfig:
    return WorkerConfig(
        listen=[Address("local", "worker")],
        model=folder,
        device="cpu",
        max_num_seqs=2,
        max_num_batched_tokens=32,
        max_model_len=64,
        num_blocks=8,
        **settings,
    )


def test_scales_of_k_and_v_come_from_the_checkpoint(tiny: MakeTiny, tmp_path: Path) -> None:
    scheme = {**E4M3, "strategy": "tensor", "dynamic": False}
    folder = compress(tiny("llama").folder, tmp_path / "model", kv_cache_scheme=scheme)
    names = [f"model.layers.{layer}.self_attn.{part}_scale" for layer in range(3) for part in "kv"]
    change_tensors(folder, **{name: torch.tensor(0.01 * (1 + place)) for place, name in enumerate(names)})

    core = load_core(worker_config(folder, kv_cache_dtype="fp8"), lambda progress: None)

    expected = torch.tensor([[[0.01, 0.01], [0.02, 0.02]], [[0.03, 0.03], [0.04, 0.04]], [[0.05, 0.05], [0.06, 0.06]]])
    decoder = load_decoder(folder, torch.float32, CPU)
    assert decoder.kv_scales is not None
    torch.testing.assert_close(decoder.kv_scales, expected)
    assert core.model.kv_format == kv_format(torch.float8_e4m3fn, decoder.kv_scales)
    change_tensors(folder, **{names[4]: None})
    with pytest.raises(MissingTensorError, match=r"lacks model\.layers\.2\.self_attn\.k_scale"):
        load_decoder(folder, torch.float32, CPU)


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_the_setting_reaches_the_decoder(tiny: MakeTiny, load_format: str) -> None:
    settings = worker_config(tiny("llama").folder, quantization="fp8", load_format=load_format)
    model = load_core(settings, lambda progress: None).runner.model  # type: ignore[attr-defined]

    assert all(isinstance(layer.gate_up, DequantizedLinear) for layer in model.layers)


def test_dummy_weights_of_a_compressed_config_need_no_checkpoint(tiny: MakeTiny, tmp_path: Path) -> None:
    folder = compress(tiny("llama").folder, tmp_path / "model", ignore=["lm_head", "model.layers.0.mlp.down_proj"])
    (folder / "model.safetensors").unlink()
    decoder = make_dummy_decoder(folder, torch.float32, CPU)

    assert [isinstance(layer.down, DequantizedLinear) for layer in decoder.layers] == [False, True, True]
