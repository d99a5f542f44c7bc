"""``rl.accelerate`` on models of transformers with recurrent mixers."""

from __future__ import annotations

import copy
import pickle
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from mixer_models import (
    EAGER,
    FAMILIES,
    LowRank,
    accelerated,
    continued,
    drawn_prompts,
    logits_of,
    padded,
    small_model,
)
from raglane.errors import ArgumentError, ShapeError
from raglane.kernels.cpu import steps
from raglane.nn.porting.transformers.base import Mixer
from raglane.nn.porting.transformers.entry import Entry

transformers: Any = pytest.importorskip("transformers", reason="compares with transformers")
BOUND = 1e-5
LENGTHS = [3, 5, 2, 1]
families = pytest.mark.parametrize("family", list(FAMILIES))
HYBRID = "bamba"
WITHOUT_POSITIONS = ["mamba", "falcon_mamba", "mamba2"]
WITH_ATTENTION = ["jamba", "bamba", "qwen3_5", "qwen3_next", "olmo_hybrid"]
IN_STEPS = ["mamba", "falcon_mamba", "mamba2", *WITH_ATTENTION]
FEW = ["mamba", "mamba2", "qwen3_5", "jamba"]


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all float32 of transformers be float64."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)
    # A default of a function, which may have been imported before.
    name = "transformers.models.recurrent_gemma.modeling_recurrent_gemma"
    scan = import_module(name).RecurrentGemmaRglru._rnn_scan
    monkeypatch.setattr(scan, "__defaults__", (torch.float64,))


def _worst(ours: Any, theirs: Any) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))


def _gradients(model: Any, tokens: Tensor, **options: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(tokens, labels=tokens, **options).loss.backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@families
@pytest.mark.usefixtures("exact")
def test_numbers(family: str) -> None:
    model = small_model(family)
    fast = accelerated(model)
    assert rl.explain(fast).replaced
    assert type(fast) is type(model)
    (prompt,) = drawn_prompts([11])
    assert _worst([logits_of(fast, prompt)], [logits_of(model, prompt)]) < 1e-10
    ours, theirs = [
        _gradients(each.train(), prompt.unsqueeze(0), use_cache=False) for each in (fast, model)
    ]
    assert ours.keys() == theirs.keys()
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    assert _worst(ours.values(), theirs.values()) < 1e-10 * largest


def _arguments() -> dict[str, dict[str, Tensor]]:
    lengths = torch.tensor(LENGTHS)
    sequences = torch.repeat_interleave(torch.arange(4), lengths)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return {
        "seq_idx": {"seq_idx": sequences.unsqueeze(0).int()},
        "position_ids": {"position_ids": positions.unsqueeze(0)},
        "cu_seq_lens_q": {"cu_seq_lens_q": torch.tensor([0, *lengths.cumsum(0)]).int()},
    }


@pytest.mark.parametrize("argument", list(_arguments()))
@families
def test_sequences_in_one_row(family: str, argument: str) -> None:
    model = small_model(family)
    fast = accelerated(model)
    prompts = drawn_prompts(LENGTHS)
    row = torch.cat(prompts).unsqueeze(0)
    output = fast(row, **_arguments()[argument]).logits[0]
    alone = torch.cat([logits_of(model, prompt) for prompt in prompts])
    assert _worst([output], [alone]) < BOUND


@families
def test_sequences_in_padded_rows(family: str) -> None:
    model = small_model(family)
    fast = accelerated(model)
    prompts = drawn_prompts([2, 3, 4])
    rows = [torch.cat(prompts[:2]), prompts[2]]
    tokens, mask = padded(rows, "right")
    positions = torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 0]])
    for options in ({"position_ids": positions}, {"seq_idx": torch.tensor([[0, 0, 1, 1, 1]] * 2)}):
        if "seq_idx" in options:
            rows[1] = prompts[2][:2]
            tokens, mask = padded(rows, "right")
        output = fast(tokens, attention_mask=mask, **options).logits
        alone = torch.cat([logits_of(model, prompt) for prompt in prompts[:2]])
        ours = [output[0], output[1, : len(rows[1])]]
        assert _worst(ours, [alone, logits_of(model, rows[1])]) < BOUND


@pytest.mark.parametrize("side", ["left", "right"])
@families
def test_padded_rows(family: str, side: str) -> None:
    model = small_model(family)
    prompts = drawn_prompts([4, 7, 1])
    tokens, mask = padded(prompts, side)
    output = accelerated(model)(tokens, attention_mask=mask, use_cache=False).logits
    rows = [output[row][mask[row] == 1] for row in range(3)]
    assert _worst(rows, [logits_of(model, prompt) for prompt in prompts]) < BOUND


@families
def test_generation(family: str) -> None:
    model = small_model(family)
    fast = accelerated(model)
    prompts = drawn_prompts([4, 7, 1])
    tokens, mask = padded(prompts, "left")
    options = {"max_new_tokens": 6, "do_sample": False}
    output = fast.generate(tokens, attention_mask=mask, **options)
    for row, prompt in zip(output, prompts, strict=True):
        assert torch.equal(row[7:], continued(model, prompt, 6))
    if family == "xlstm":  # transformers refuses beams
        return
    output = fast.generate(tokens, attention_mask=mask, num_beams=3, **options)
    for row, prompt in zip(output, prompts, strict=True):
        alone = fast.generate(prompt.unsqueeze(0), num_beams=3, use_cache=False, **options)
        assert torch.equal(row[7:], alone[0, len(prompt) :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", IN_STEPS)
@torch.no_grad()
def test_a_step_is_one_call(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the numbers of the same step by modules, also where a hook needs these."""
    model = accelerated(small_model(family)).to(dtype)
    output = model(torch.stack(drawn_prompts([5, 5])), use_cache=True)
    cache = output.get("cache") or output.past_key_values
    caches = [copy.deepcopy(cache) for _ in range(3)]
    token = torch.stack(drawn_prompts([1, 1]))
    count: list[int] = []

    def counted(name: str) -> Any:
        run = operator(name)
        count.append(0)

        def call(*arguments: Any) -> Any:
            count[-1] += 1
            return run(*arguments)

        return call

    operator = steps._operator
    monkeypatch.setattr(steps, "_operator", counted)
    mixers: list[Any] = [module for module in model.modules() if isinstance(module, Mixer)]
    once = [model(token, cache=caches[0], use_cache=True).logits for _ in range(2)]
    assert sum(count) == 2 * len(mixers)
    monkeypatch.setattr(steps, "_operator", operator)
    ends: list[int] = []
    for mixer in mixers:
        mixer.register_forward_hook(lambda *_: ends.append(1))
        last = mixer.o_proj if family == "olmo_hybrid" else mixer.out_proj
        last.register_forward_hook(lambda *_: ends.append(1))
    hooked = [model(token, cache=caches[1], use_cache=True).logits for _ in range(2)]
    assert len(ends) == 4 * len(mixers)
    monkeypatch.setattr(steps, "_operator", lambda _: None)
    apart = [model(token, cache=caches[2], use_cache=True).logits for _ in range(2)]
    bound = 1e-4 if dtype is torch.float32 else 1e-6  # transformers normalises in float32
    assert _worst(once, apart) < bound
    assert _worst(hooked, apart) < bound


@pytest.mark.parametrize("family", ["mamba2", "qwen3_5"])
def test_generation_with_a_static_cache(family: str) -> None:
    model = small_model(family)
    prompts = drawn_prompts([4, 7, 1])
    tokens, mask = padded(prompts, "left")
    output = accelerated(model).generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=6,
        do_sample=False,
        cache_implementation="static",
        disable_compile=True,
    )
    for row, prompt in zip(output, prompts, strict=True):
        assert torch.equal(row[7:], continued(model, prompt, 6))


@families
def test_prefill_in_parts(family: str) -> None:
    model = small_model(family)
    fast = accelerated(model)
    prompts = drawn_prompts([11, 2, 9])
    tokens, mask = padded(prompts, "left")
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    outputs = []
    cache: Any = None
    if family != "xlstm":  # which has a cache of its own
        cache = transformers.DynamicCache(config=fast.config)
    for begin, end in ((0, 3), (3, 4), (4, 10), (10, 11)):
        options = {"cache": cache, "attention_mask": mask[:, :end], "use_cache": True}
        if family not in WITHOUT_POSITIONS:
            options["position_ids"] = positions[:, begin:end]
        output = fast(tokens[:, begin:end], **options)
        cache = output.cache if family == "xlstm" else cache
        outputs.append(output.logits)
    output = torch.cat(outputs, 1)
    rows = [output[row][mask[row] == 1] for row in range(3)]
    assert _worst(rows, [logits_of(model, prompt) for prompt in prompts]) < BOUND


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("family", FEW)
def test_gradient_checkpointing(family: str, is_reentrant: bool) -> None:
    fast = accelerated(small_model(family)).train()
    row = torch.cat(drawn_prompts(LENGTHS)).unsqueeze(0)
    options = _arguments()["position_ids"]
    plain = _gradients(fast, row, **options)
    fast.activation_checkpointing_enable({"use_reentrant": is_reentrant})
    again = _gradients(fast, row, **options)
    assert plain.keys() == again.keys()
    assert _worst(again.values(), plain.values()) < 1e-12


@pytest.mark.parametrize("family", FEW)
def test_linear_layers_are_called(family: str) -> None:
    model = small_model(family)
    for block in list(model.modules()):
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear) and name != "lm_head":
                setattr(block, name, LowRank(layer))
    fast = accelerated(model)
    (prompt,) = drawn_prompts([7])
    assert _worst([logits_of(fast, prompt)], [logits_of(model, prompt)]) < 1e-4
    assert all(layer.calls == 1 for layer in fast.modules() if isinstance(layer, LowRank))


@pytest.mark.parametrize("family", FEW)
def test_files(family: str, tmp_path: Path) -> None:
    model = small_model(family)
    fast = accelerated(model)
    (prompt,) = drawn_prompts([7])
    expected = logits_of(fast, prompt)
    fast.save_pretrained(tmp_path / "fast")
    options = EAGER if family == "jamba" else {}
    kind = type(model)
    stored = kind.from_pretrained(tmp_path / "fast", dtype=torch.float64, **options).eval()
    assert stored.config.architectures == [type(model).__name__]
    assert _worst([logits_of(stored, prompt)], [expected]) < BOUND
    # Tensors of a file are not aligned as those of torch, of which bits of a BLAS may depend.
    aligned = copy.deepcopy(rl.accelerate(stored))
    assert torch.equal(logits_of(aligned, prompt), expected)
    fast.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(logits_of(other, prompt), expected)
        assert rl.explain(other).replaced == rl.explain(fast).replaced


@families
def test_undo(family: str) -> None:
    model = small_model(family)
    fast = accelerated(rl.accelerate(copy.deepcopy(model)))  # twice
    rl.to_torch(fast)
    assert not any(isinstance(module, Mixer) for module in fast.modules())
    assert [type(module) for module in fast.modules()] == [type(each) for each in model.modules()]
    for ours, theirs in zip(fast.modules(), model.modules(), strict=True):
        assert not any(isinstance(hook, Entry) for hook in ours._forward_pre_hooks.values())
        assert vars(ours).keys() == vars(theirs).keys()
    (prompt,) = drawn_prompts([7])
    assert torch.equal(logits_of(fast, prompt), logits_of(model, prompt))


def test_flattened_by_the_collator() -> None:
    collate = transformers.DataCollatorWithFlattening(
        return_seq_idx=True, return_flash_attn_kwargs=True
    )
    for family in ("mamba", "qwen3_5"):
        model = small_model(family)
        prompts = drawn_prompts(LENGTHS[:3])
        batch = collate([{"input_ids": prompt.tolist()} for prompt in prompts])
        loss = accelerated(model).train()(**batch).loss.detach()
        parts = [
            model(prompt.unsqueeze(0), labels=prompt.unsqueeze(0)).loss.detach() * (len(prompt) - 1)
            for prompt in prompts
        ]
        assert abs(float(loss) - float(sum(parts)) / 7) < BOUND


@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_5"])
def test_a_cache_keeps_its_tensors(family: str) -> None:
    model = small_model(family)
    fast = accelerated(model)
    tokens = torch.stack(drawn_prompts([6, 6]))
    caches = []
    for each in (fast, model):
        output = each(tokens, use_cache=True)
        caches.append(output.get("cache") or output.past_key_values)
    ours, theirs = [cache.layers[0] for cache in caches]
    for name in ("conv_states", "recurrent_states"):
        state, exact = getattr(ours, name)[0], getattr(theirs, name)[0]
        assert state.shape == exact.shape
        assert _worst([state], [exact]) < BOUND
    before = [states[0].data_ptr() for states in (ours.conv_states, ours.recurrent_states)]
    fast(tokens[:, :1], cache=caches[0], use_cache=True)
    fast(tokens[:, :3], cache=caches[0], use_cache=True)
    assert before == [states[0].data_ptr() for states in (ours.conv_states, ours.recurrent_states)]


def test_calls_that_are_refused() -> None:
    fast = accelerated(small_model(HYBRID))
    row = torch.cat(drawn_prompts(LENGTHS)).unsqueeze(0)
    packed = _arguments()["seq_idx"]
    with pytest.raises(ArgumentError, match="use_cache"):
        fast(row, use_cache=True, **packed)
    with pytest.raises(ShapeError, match="cu_seq_lens_q"):
        fast(row.expand(2, -1), **_arguments()["cu_seq_lens_q"])
    with pytest.raises(ShapeError, match="seq_idx"):
        fast(row, seq_idx=torch.zeros(1, 3, dtype=torch.int32))
    cache = transformers.DynamicCache(config=fast.config)
    cache.activate_past_recording()
    with pytest.raises(ArgumentError, match="speculative"):
        fast(row, cache=cache)


def test_a_mixer_that_is_left() -> None:
    model = small_model("mamba")
    mixer = model.backbone.layers[0].mixer
    mixer.forward = mixer.forward
    with pytest.warns(UserWarning, match="replaced on the instance"):
        rl.accelerate(model)
    assert rl.explain(model).replaced == ["backbone.layers.1.mixer"]


def test_bfloat16() -> None:
    for family in ("mamba", "mamba2", "qwen3_5"):
        model = small_model(family)
        (prompt,) = drawn_prompts([30])
        exact = logits_of(model, prompt).detach()
        output = logits_of(accelerated(model).bfloat16(), prompt).detach()
        scale = float(exact.abs().max())
        theirs = _worst([logits_of(model.bfloat16(), prompt).double()], [exact]) / scale
        assert _worst([output.double()], [exact]) / scale < max(1.5 * theirs, 0.03)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_5"])
def test_compiled_as_one_graph(family: str) -> None:
    torch._dynamo.reset()
    model = small_model(family)
    fast = accelerated(model)
    compiled: Any = torch.compile(fast, fullgraph=True, backend="eager")
    tokens, mask = padded(drawn_prompts([4, 7, 1]), "left")
    for options in ({}, {"attention_mask": mask}):
        ours = compiled(tokens, use_cache=False, **options).logits
        rows = mask == 1 if options else torch.ones_like(mask) == 1
        plain = fast(tokens, use_cache=False, **options).logits
        assert _worst([ours[rows]], [plain[rows]]) < BOUND
