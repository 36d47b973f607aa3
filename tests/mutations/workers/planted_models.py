"""Bugs to plant in the architectures: each is of one family, or of what a family uses alone."""

from tests.mutations.planted import Planted

MODELS = "workers/models"


def _it_holds(shape: str, check: str = "logits") -> str:
    return f"tests/parity/test_architectures.py::test_it_holds[{shape}-{check}]"


MODEL_BUGS = (
    Planted(
        "a stretched position turns as it did before",
        "workers/models/layers/rope.py",
        "found_R = plain_R / self.factor * (1 - kept_R) + plain_R * kept_R",
        "found_R = plain_R",
        _it_holds("qwen3/stretched"),
    ),
    Planted(
        "long wavelengths are not stretched",
        "workers/models/layers/rope.py",
        "found_R = (1 - kept_R) * plain_R / self.factor + kept_R * plain_R",
        "found_R = plain_R",
        _it_holds("llama/stretched"),
    ),
    Planted(
        "stretched positions focus as plain ones",
        "workers/models/architectures/decoder.py",
        "angles[rope] = _scaled(self._ops.rope_angles(inputs.positions_T, frequencies_R), rope.scale)",
        "angles[rope] = self._ops.rope_angles(inputs.positions_T, frequencies_R)",
        _it_holds("qwen3/stretched"),
    ),
    Planted(
        "sinks are not read",
        "workers/models/layers/attention.py",
        'sinks_H=read("self_attn.sinks").float() if self.sinks else None,',
        "sinks_H=None,",
        _it_holds("gpt_oss/alternating"),
    ),
    Planted(
        "a window sees one token more",
        "workers/models/layers/attention.py",
        "window = spec.tokens if isinstance(spec, Window) else None",
        "window = spec.tokens + 1 if isinstance(spec, Window) else None",
        _it_holds("gpt_oss/narrow"),
    ),
    Planted(
        "gate and up of woven experts are taken for each other",
        "workers/models/layers/moe.py",
        "torch.cat([by_turns[:, 0::2], by_turns[:, 1::2]], dim=1)",
        "torch.cat([by_turns[:, 1::2], by_turns[:, 0::2]], dim=1)",
        _it_holds("gpt_oss/alternating"),
    ),
    Planted(
        "woven columns are cut apart between ranks",
        "workers/models/layers/moe.py",
        "self.into: Weight((self.count, hidden, 2 * self.inner), EvenRuns(dim=2, step=2)),",
        "self.into: Weight((self.count, hidden, 2 * self.inner), EvenRuns(dim=2)),",
        _it_holds("gpt_oss/alternating", "ranks"),
    ),
    Planted(
        "stacked experts are cut across gate and up",
        "workers/models/layers/moe.py",
        "EvenRuns(runs=2, dim=1)),",
        "EvenRuns(dim=1)),",
        _it_holds("qwen3_5_moe/text", "ranks"),
    ),
    Planted(
        "a branch is not scaled",
        "workers/models/architectures/decoder.py",
        "return _scaled(whole_TH, self._config.residual_scale)",
        "return whole_TH",
        _it_holds("granitemoehybrid/moe"),
    ),
    Planted(
        "logits are not scaled",
        "workers/models/architectures/granite.py",
        'logits_scale=1 / number(raw, "logits_scaling", 1.0),',
        "logits_scale=1.0,",
        _it_holds("granitemoehybrid/moe"),
    ),
    Planted(
        "turning pairs of a latent are not put in order",
        "workers/models/layers/latent.py",
        "turning = torch.cat([turning[:, 0::2], turning[:, 1::2]], dim=1)",
        "turning = torch.cat([turning[:, 1::2], turning[:, 0::2]], dim=1)",
        _it_holds("deepseek_v3/groups"),
    ),
    Planted(
        "latents of stretched positions are not focused",
        "workers/models/architectures/deepseek.py",
        "_focus(raw) ** 2",
        "_focus(raw)",
        _it_holds("deepseek_v3/groups"),
    ),
    Planted(
        "experts are chosen without their bias",
        "workers/models/layers/moe.py",
        "bias_E=None if router.choice_bias is None else read(router.choice_bias).float(),",
        "bias_E=None,",
        _it_holds("deepseek_v3/plain-query"),
    ),
    Planted(
        "the shared experts of DeepSeek are as wide as one",
        "workers/models/architectures/deepseek.py",
        "DenseConfig(inner=inner * shared,",
        "DenseConfig(inner=inner,",
        _it_holds("deepseek_v3/plain-query"),
    ),
    Planted(
        "positions turn where a model tells none",
        "workers/models/architectures/granite.py",
        'rope=rope_of(raw, head_dim) if positions == "rope" else None,',
        "rope=rope_of({**raw, 'rope_theta': 1e4}, head_dim),",
        _it_holds("granitemoehybrid/moe"),
    ),
    Planted(
        "gates of Qwen3.5 change places",
        "workers/models/layers/gated_delta.py",
        'map(weight, "zba")',
        'map(weight, "zab")',
        _it_holds("qwen3_5/text"),
    ),
    Planted(
        "a token's weights of Qwen3.5's experts do not sum to 1",
        "workers/models/architectures/qwen3_next.py",
        'return mlps_of({"norm_topk_prob": True} | dict(raw))',
        "return mlps_of(dict(raw))",
        _it_holds("qwen3_5_moe/text"),
    ),
)
