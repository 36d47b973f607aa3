#!/usr/bin/env bash
# Debian's libraries that Mooncake is linked with: root installs them, others unpack them into a folder of their own,
# for LD_LIBRARY_PATH. Without them the page store `file` serves as before, so this never fails.
#   mooncake_libs.sh PYTHON FOLDER [--unpack]     --unpack: also as root
set -uo pipefail
python=$1 folder=$2 how=${3:-}
packages=(libibverbs1 libnuma1 libcurl4)

missing() {
  local master
  master=$("$python" -c 'import mooncake; print(mooncake.__path__[0])')/mooncake_master || return
  LD_LIBRARY_PATH=$folder ldd "$master" | awk '/not found/ {print $1}' | sort -u | paste -sd' '
}

unpack() {
  local work new
  work=$(mktemp -d) || return
  trap 'rm -rf "$work"' RETURN
  mkdir -p "$folder" "$work/state/lists/partial" "$work/cache/archives/partial"
  local own=(-o "Dir::State=$work/state" -o Dir::State::status=/var/lib/dpkg/status -o "Dir::Cache=$work/cache"
    -o APT::Sandbox::User= -o Debug::NoLocking=1)
  apt-get "${own[@]}" -qq update || return
  # what is installed with another version stays as it is: its line has the old version in brackets
  new=$(apt-get "${own[@]}" --simulate --no-install-recommends --no-upgrade install "${packages[@]}" |
    awk '$1 == "Inst" && $3 !~ /^\[/ {print $2}')
  if [ "$how" = --unpack ]; then new="$new ${packages[*]}"; fi
  (cd "$work" && apt-get "${own[@]}" -qq download $new) || return # word by word
  for archive in "$work"/*.deb; do dpkg-deb -x "$archive" "$work/files" || return; done
  find "$work/files" -name 'lib*.so*' -path '*/lib/*' -exec cp -Pf -t "$folder" {} +
}

[ -n "$(missing)" ] || [ "$how" = --unpack ] || exit 0
echo "Mooncake lacks $(missing)"
if [ "$(id -u)" = 0 ] && [ "$how" != --unpack ]; then
  install=(apt-get install -y -qq --no-install-recommends "${packages[@]}")
  "${install[@]}" &>/dev/null || { apt-get -qq update && "${install[@]}" >/dev/null; }
else
  unpack
fi
if [ -n "$(missing)" ]; then
  echo "Mooncake stays without $(missing): apt-get install ${packages[*]}; --store file:///path works meanwhile"
fi
exit 0
