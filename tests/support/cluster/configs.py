"""Valid configurations drawn by hypothesis, as the trees of YAML files."""

from typing import Any

from hypothesis import strategies as st

Tree = dict[str, Any]

TEXTS = st.text(
    st.characters(
        codec="utf-8", exclude_categories=["Cs", "Cc"], exclude_characters="\x85\u2028\u2029\ufeff"
    ),
    min_size=1,
    max_size=12,
)
COUNTS = st.integers(1, 9)
SECONDS = st.floats(0.001, 1e6)
SIZES = st.sampled_from(["64MiB", "1.5g", "1GiB", "4096"]) | st.integers(0, 2**50)
PARTS = st.sampled_from([0, 0.25, 1, 2, 8])
PORTS = st.integers(0, 65535)


def nodes(
    required: "dict[str, st.SearchStrategy[Any]]", **optional: "st.SearchStrategy[Any]"
) -> st.SearchStrategy[Tree]:
    return st.fixed_dictionaries(required, optional=optional)


def groups(role: str) -> st.SearchStrategy[Tree]:
    return nodes(
        {"role": st.just(role)},
        replicas=COUNTS,
        tensor_parallel_size=COUNTS,
        tensor_parallel_nodes=COUNTS,
        memory=SIZES,
        memory_floor=SIZES | st.none(),
        device=st.sampled_from(["cpu", "cuda"]),
        threads=COUNTS,
        num_cpus=PARTS,
        num_gpus=st.sampled_from([None, 0.25, 1, 2]),
        resources=st.dictionaries(TEXTS, PARTS, max_size=2),
        labels=st.dictionaries(TEXTS, TEXTS, max_size=2),
    )


def with_maximum(group: Tree) -> Tree:
    return {**group, "replicas_max": group.get("replicas", 1) + 3}


PAIRS = st.tuples(
    groups("prefill"), groups("prefill").map(with_maximum), groups("decode").map(with_maximum)
).map(lambda drawn: [drawn[1], drawn[0], drawn[2]])
GROUPS = (
    st.tuples(groups("prefill"), groups("decode")).map(list)
    | PAIRS
    | groups("mixed").map(with_maximum).map(lambda group: [group])
)

ENGINES = nodes(
    {},
    page_size=COUNTS,
    kv_cache_dtype=st.sampled_from(["auto", "float32", "bfloat16", "fp8"]),
    state_dtype=st.sampled_from(["float32", "bfloat16"]),
    max_num_seqs=COUNTS | st.none(),
    gpu_memory_utilization=st.floats(0.01, 1),
    num_speculative_tokens=st.integers(0, 16),
    speculative_method=st.sampled_from(["auto", "ngram"]),
    overlap=st.booleans(),
    kernels=st.sampled_from(["cpu", "triton", "reference", None]),
    memory_broker=st.booleans(),
    checkpoint_interval=COUNTS | st.none(),
    eviction_policy=st.sampled_from(["lru", "value"]),
)


@st.composite
def models(draw: st.DrawFn) -> list[Tree]:
    """Draw models with different names."""
    count = draw(st.integers(1, 3))
    return [
        {
            **draw(
                nodes(
                    {"model": TEXTS},
                    max_model_len=COUNTS | st.none(),
                    ttft_max=SECONDS,
                    routers=COUNTS,
                    groups=GROUPS,
                    engine=ENGINES,
                )
            ),
            "served_model_name": draw(
                st.sampled_from([f"name-{index}", [f"name-{index}", f"alias {index}"]])
            ),
        }
        for index in range(count)
    ]


TREES = nodes(
    {"models": models()},
    store=nodes({}, url=TEXTS | st.none(), secret_file=TEXTS | st.none()),
    edge=nodes(
        {},
        host=TEXTS,
        port=PORTS,
        grpc_port=PORTS | st.none(),
        send_timeout=SECONDS,
        shutdown_timeout=SECONDS,
        allowed_origins=st.lists(TEXTS, max_size=2),
        allow_credentials=st.booleans(),
        api_keys_file=TEXTS,
    ),
    cluster=nodes({}, ray_address=TEXTS, namespace=TEXTS, host=st.sampled_from(["loopback", "node-plain"])),
    telemetry=nodes({}, log_level=st.sampled_from(["debug", "error"]), log_json=st.booleans()),
)
