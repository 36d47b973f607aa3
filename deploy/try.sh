#!/usr/bin/env bash
# Tries the chart on a Kubernetes cluster and prints a table of verdicts. It has not run on a cluster yet.
# shellcheck disable=SC2329 # functions are called by `step`
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

usage() {
  cat <<TEXT
usage: deploy/try.sh [--kind] [--image REPOSITORY:TAG] [--values FILE] [--keep]

Installs KubeRay and the chart in a namespace of its own, asks six questions, deletes each kind of
pod in the middle of a stream, upgrades, uninstalls, and prints one verdict per step. It needs
helm, curl, and kubectl with a current context.
  --kind     make a cluster with kind, build and load the image, and delete the cluster at the end
  --image    the image that the nodes can pull (tidemill:0.2.0)
  --values   the values of the release (deploy/helm/examples/cpu-only.yaml)
  --keep     leave the release, and the cluster of kind, as they are at the end
TEXT
}

image=tidemill:0.2.0 values=deploy/helm/examples/cpu-only.yaml kind='' keep=''
while (($#)); do
  case $1 in
    --kind) kind=yes ;;
    --keep) keep=yes ;;
    --image) image=${2:?--image needs a value} && shift ;;
    --values) values=${2:?--values needs a file} && shift ;;
    -h | --help) usage && exit 0 ;;
    *) usage >&2 && exit 2 ;;
  esac
  shift
done
namespace=tidemill-try release=try
readonly image values kind keep namespace release
readonly model=keeper port=${TRY_PORT:-18000} frontend=deployment/$release-tidemill-frontend
readonly url=http://127.0.0.1:$port selector=app.kubernetes.io/instance=$release
readonly wait_s=${TRY_WAIT_S:-1800}
folder=$(mktemp -d)
failed=0
declare -a table=()

for program in kubectl helm curl ${kind:+kind docker}; do
  command -v "$program" >/dev/null || { echo "$program is missing: install it first" >&2; exit 2; }
done

verdict() { # verdict NAME STATUS: keeps the row and shows it
  local word=passed
  (($2 == 0)) || { word=FAILED && failed=1; }
  table+=("$(printf '%-44s %s' "$1" "$word")")
  echo "${table[-1]}"
}

step() { # step NAME COMMAND...: runs it with its output in a file, whose end is shown when it fails
  local name=$1 status=0
  shift
  "$@" >"$folder/step.log" 2>&1 || status=$?
  ((status == 0)) || tail -n 20 "$folder/step.log" >&2
  verdict "$name" "$status"
  return "$status"
}

k() { kubectl --namespace "$namespace" "$@"; }

forward() { # connects $port to the Service, again whenever that ends, until this is ended
  local child=
  trap '[ -z "$child" ] || kill "$child"; exit' TERM
  while sleep 1; do
    kubectl --namespace "$namespace" port-forward "service/$release-tidemill" "$port:8000" &
    child=$! # of kubectl itself, so not by k
    wait
  done >/dev/null 2>&1
}

ready() {
  for ((i = 0; i < wait_s; i++)); do
    curl -fsS -m 5 "$url/health/ready" && return 0
    sleep 1
  done
  return 1
}

complete() { # complete PROMPT TOKENS STREAM: prints the answer
  curl -fsS -N -m 600 -H 'content-type: application/json' "$url/v1/completions" -d \
    "{\"model\":\"$model\",\"prompt\":\"$1\",\"max_tokens\":$2,\"temperature\":0,\"ignore_eos\":true,\"stream\":$3}"
}

text() { grep -o '"text":"\([^"\\]\|\\.\)*"' | sed 's/^"text":"//; s/"$//' | tr -d '\n'; }

same() { # same FILE: whether the stream that comes in has the text of FILE
  text | cmp - "$1"
}

long="Each evening the keeper writes down what the tide has brought, and what it took away again. "
long="$long$long$long$long"
whole() { complete "$long" 64 false | text | grep -q .; }
streamed() { complete "$long" 64 true | text >"$folder/answer" && [ -s "$folder/answer" ]; }
again() { complete "$long" 64 true | same "$folder/answer"; }
cached() { complete "$long" 1 false | grep -q '"cached_tokens":[1-9]'; }
refused() { curl -sS "$url/v1/completions" -H 'content-type: application/json' -d '{"max_tokens":0}' | grep -q '"error"'; }
named() { curl -fsS "$url/v1/models" | grep -q "\"id\":\"$model\""; }

lose() { # lose COMPONENT: kills its pods amid a stream; the stream goes on with the same text, or all is ready again
  complete "$long" 512 true | text >"$folder/whole"
  [ -s "$folder/whole" ] || return 1
  complete "$long" 512 true >"$folder/stream" &
  local stream=$! exact=0
  sleep 1
  k delete pod -l "$selector,app.kubernetes.io/component=$1" --grace-period=0 --force --wait=false
  wait "$stream" && same "$folder/whole" <"$folder/stream" || exact=1
  ready && again || return 1
  case $1 in
    frontend | head) return 0 ;; # its streams may break
    *) return "$exact" ;;
  esac
}

gone() { # waits until no pod of the namespace is left
  k wait pod --all --for=delete --timeout=300s && [ -z "$(k get pods -o name)" ]
}

clean() {
  local job
  for job in $(jobs -p); do kill "$job"; done 2>/dev/null
  rm -rf "$folder"
}
trap clean EXIT

[ -z "$kind" ] || {
  step 'kind: a cluster' kind create cluster --name "$release" --wait 5m || exit 1
  step 'kind: the image is built' docker build -f deploy/docker/Dockerfile --target cpu -t "$image" . || exit 1
  step 'kind: the image is on its node' kind load docker-image --name "$release" "$image" || exit 1
}

step 'KubeRay is installed' helm upgrade --install kuberay-operator kuberay-operator --version 1.7.0 \
  --repo https://ray-project.github.io/kuberay-helm/ --namespace kuberay --create-namespace --wait \
  --set 'featureGates[0].name=RayClusterNetworkPolicy' --set 'featureGates[0].enabled=true' || exit 1
install=(helm upgrade --install "$release" deploy/helm/tidemill --namespace "$namespace" --create-namespace
  -f "$values" --set "image.repository=${image%:*}" --set "image.tag=${image##*:}")
step 'the chart is installed' "${install[@]}" || exit 1
step 'the frontend is rolled out' k rollout status "$frontend" "--timeout=${wait_s}s" || exit 1
forward &
step 'the Service is ready' ready || exit 1

step 'question 1: the models' named
step 'question 2: a completion' whole
step 'question 3: a stream' streamed
step 'question 4: the same stream again' again
step 'question 5: cached tokens' cached
step 'question 6: a wrong request is refused' refused
for component in worker head mooncake store-memory frontend; do
  step "kill -9: $component" lose "$component"
done
step 'upgrade' "${install[@]}" --set-string 'frontend.annotations.tidemill-try=upgrade'
step 'upgrade: rolled out' k rollout status "$frontend" "--timeout=${wait_s}s"
step 'upgrade: the same answer' lose none

[ -n "$keep" ] || {
  step 'uninstall' helm uninstall "$release" --namespace "$namespace" --wait
  step 'uninstall: no pod is left' gone
  kubectl delete namespace "$namespace" >/dev/null 2>&1
  [ -z "$kind" ] || kind delete cluster --name "$release"
}

printf '%s\n' '' "${table[@]}"
exit "$failed"
