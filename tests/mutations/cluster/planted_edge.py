"""Bugs to plant in who may come in: gRPC beside HTTP, and certificates between the processes of a cluster."""

from tests.mutations.planted import UNIT, Planted

ANSWERS = f"{UNIT}/cluster/edge/grpc_api/test_generation.py"
EDGES = f"{UNIT}/cluster/edge/grpc_api/test_edges.py"
CALLING = "cluster/edge/chat/output/tool_call_stream.py"
CALLS = f"{UNIT}/cluster/edge/chat/test_tool_call_parser.py"
SPEECH = f"{UNIT}/cluster/edge/chat/test_output_parser.py"
FAMILIES = f"{UNIT}/cluster/edge/chat/test_families.py"
HTTP_FAMILIES = f"{UNIT}/cluster/edge/http/test_families.py"
SITES = "cluster/edge/http/same_origin.py"
TLS = f"{UNIT}/cluster/rpc/test_mutual_tls.py"

GENERATION = "cluster/edge/grpc_api/generation.py"
ADMIT = "                self._desk.keys.admit(path, headers)\n"
READ = "                data = await self._read(frames)\n"

EDGE_BUGS = (
    Planted(
        "gRPC asks nobody for a key",
        GENERATION,
        ADMIT,
        "",
        EDGES,
    ),
    Planted(
        "the message of a stranger is read first",
        GENERATION,
        f"{ADMIT}{READ}",
        f"{READ}{ADMIT}",
        EDGES,
    ),
    Planted(
        "messages of all calls together are not bounded",
        GENERATION,
        "self._num_bytes.holding(len(data))",
        "self._num_bytes.holding(0)",
        EDGES,
    ),
    Planted(
        "a client may take for ever to send its message",
        GENERATION,
        "asyncio.timeout(self._desk.limits.body_s_max)",
        "asyncio.timeout(None)",
        EDGES,
    ),
    Planted(
        "a client that does not read is kept for ever",
        GENERATION,
        "asyncio.timeout(self._desk.limits.send_s_max)",
        "asyncio.timeout(None)",
        EDGES,
    ),
    Planted(
        "usage comes with the first choice that ends",
        GENERATION,
        "if not unfinished:",
        "if increment.growth.finish is not None:",
        ANSWERS,
    ),
    Planted(
        "a prompt of token ids is taken for a text",
        "cluster/edge/grpc_api/messages.py",
        "prompt if ids is None else list(request.token_ids.ids)",
        "prompt",
        ANSWERS,
    ),
    Planted(
        "token ids beyond a stop string are told",
        "cluster/edge/requests/answers.py",
        "piece.tokens[: growth.num_tokens]",
        "piece.tokens",
        ANSWERS,
    ),
    Planted(
        "nobody is told when to come again",
        "cluster/edge/grpc_api/errors.py",
        '(headers_of(error) or {}).get("retry-after")',
        "None",
        f"{ANSWERS} {EDGES}",
    ),
    Planted(
        "a bug tells clients of itself",
        "cluster/edge/grpc_api/errors.py",
        '        said["message"] or "",\n',
        "        str(error),\n",
        ANSWERS,
    ),
    Planted(
        "health counts workers that only prefill",
        "cluster/edge/requests/models.py",
        ' and one.info.role != "prefill"',
        "",
        EDGES,
    ),
    Planted(
        "clients of gRPC need no certificate where HTTP wants one",
        "cluster/edge/grpc_api/server.py",
        "require_client_auth=tls.client_ca is not None",
        "require_client_auth=False",
        EDGES,
    ),
    Planted(
        "processes need no certificate to be heard",
        "cluster/rpc/channels.py",
        "require_client_auth=True",
        "require_client_auth=False",
        TLS,
    ),
    Planted(
        "any name is one of the cluster's",
        "cluster/rpc/channels.py",
        '("grpc.ssl_target_name_override", CLUSTER_NAME)',
        '("grpc.ssl_target_name_override", "elsewhere")',
        TLS,
    ),
    Planted(
        "workers listen in plain",
        "cluster/worker/server.py",
        "server_credentials(self._tls)",
        "None",
        TLS,
    ),
    Planted(
        "routers listen in plain",
        "cluster/router/server.py",
        "server_credentials(self._tls)",
        "None",
        TLS,
    ),
    Planted(
        "processes listen everywhere on their node unless told not to",
        "cluster/cli/security.py",
        '"127.0.0.1" if where == "loopback" else None',
        "None",
        TLS,
    ),
    Planted(
        "certificates that do not fit each other are found out by silence",
        "cluster/cli/security.py",
        "        tls.check()\n",
        "        pass\n",
        TLS,
    ),
    Planted(
        "ports that cannot be kept are open without a word",
        "kvstore/stores/mooncake_store.py",
        "if not self.transport.is_open:",
        "if self.transport.is_open:",
        f"{UNIT}/kvstore/stores/test_bind_filter.py",
    ),
    Planted(
        "any page of the web gives orders",
        SITES,
        "method not in READS and",
        "method in READS and",
        f"{UNIT}/cluster/edge/http/test_same_origin.py",
    ),
    Planted(
        "a name that points to loopback is one of ours",
        SITES,
        "and not _is_local(name)",
        "and not name",
        f"{UNIT}/cluster/edge/http/test_same_origin.py",
    ),
    Planted(
        "a brace in a text ends the arguments",
        CALLING,
        "elif char in self._quotes:",
        'elif char in "":',
        SPEECH,
    ),
    Planted(
        "the end of a tag is told as an argument",
        CALLING,
        "cut = len(value) - growing(value, PARAMETER_ENDS)",
        "cut = len(value)",
        CALLS,
    ),
    Planted(
        "a call that was cut short looks whole",
        CALLING,
        "self._arguments.end(closed=self.rest is not None)",
        "self._arguments.end(closed=True)",
        CALLS,
    ),
    Planted(
        "further calls come although one was wanted",
        "cluster/edge/chat/output/output_parser.py",
        "if pieces and (most is None or pieces[0].index < most):",
        "if pieces:",
        SPEECH,
    ),
    Planted(
        "a tag of a channel that comes in two pieces is words",
        "cluster/edge/chat/output/harmony.py",
        "at -= growing(self._held, ENDS)",
        "at -= 0",
        FAMILIES,
    ),
    Planted(
        "reasoning that the prompt has closed goes on",
        "cluster/edge/chat/formats.py",
        "(self.implied and not prompt.endswith(self.close))",
        "self.implied",
        FAMILIES,
    ),
    Planted(
        "special tokens that say what follows are lost",
        "cluster/edge/chat/tokenizer.py",
        "{token for token, text in self._special.items() if text not in shown}",
        "set(self._special)",
        f"{UNIT}/cluster/edge/chat/test_templates.py",
    ),
    Planted(
        "a template gets arguments in a form that it cannot take",
        "cluster/edge/chat/templates.py",
        "if calls and self.text_arguments:",
        "if False:",
        f"{UNIT}/cluster/edge/chat/test_templates.py",
    ),
    Planted(
        "a forced call spells its tags",
        "cluster/edge/chat/request/tool_grammar.py",
        'f"<[{added[part]}]>" if part in there else _quoted(part)',
        "_quoted(part)",
        f"{UNIT}/cluster/edge/chat/test_tool_grammar.py",
    ),
    Planted(
        "an answer in channels goes on behind a call",
        "cluster/edge/requests/intake.py",
        "for tag in (RETURN, CALL_END))",
        "for tag in (RETURN,))",
        HTTP_FAMILIES,
    ),
    Planted(
        "what must match something begins with a channel of its own choice",
        "cluster/edge/requests/intake.py",
        'return FINAL if asked and not body.continue_final_message else ""',
        'return ""',
        HTTP_FAMILIES,
    ),
)
