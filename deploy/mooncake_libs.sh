#!/usr/bin/env bash
# Install the Debian libraries that Mooncake is linked with. Root installs the packages; another
# user unpacks them into FOLDER, for LD_LIBRARY_PATH. Without them the page store `file` still
# works, so this script never fails.
#   mooncake_libs.sh PYTHON FOLDER [--unpack]     --unpack: unpack them also as root
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
  # Installed packages are not upgraded: their line has the installed version in brackets.
  new=$(apt-get "${own[@]}" --simulate --no-install-recommends --no-upgrade install "${packages[@]}" |
    awk '$1 == "Inst" && $3 !~ /^\[/ {print $2}')
  if [ "$how" = --unpack ]; then new="$new ${packages[*]}"; fi
  (cd "$work" && apt-get "${own[@]}" -qq download $new) || return # unquoted, one word per package
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
  echo "Mooncake still lacks $(missing): apt-get install ${packages[*]}; --store file:///path works without it"
fi
exit 0
