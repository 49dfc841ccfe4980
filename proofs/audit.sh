#!/usr/bin/env bash
# Fails when a proof is not one: an axiom, a gap, a file left out of the build, a theorem of the README that is not there,
# or a theorem that rests on anything but Coq itself.
set -euo pipefail
cd "$(dirname "$0")"

fail() { echo "proofs/audit.sh: $*" >&2; exit 1; }

# No gap and no axiom in the text; comments may speak of them. `Variable` and `Hypothesis` are closed by their section.
for file in *.v; do
  grep -qx "$file" _CoqProject || fail "$file is not in _CoqProject, so nothing checks it"
  text=$(perl -0777 -pe '1 while s/\(\*(?:(?!\(\*|\*\)).)*?\*\)//gs' "$file")
  if found=$(grep -nwE 'Admitted|admit|give_up|Axiom|Axioms|Parameter|Parameters|Conjecture|Abort|Unset Guard Checking|bypass_check' <<<"$text"); then
    fail "$file: $found"
  fi
  awk -v file="$file" '
    /^ *Section /                                   { depth++ }
    /^ *End /                                       { depth-- }
    /^ *(Variable|Variables|Hypothesis|Hypotheses|Context) / && depth < 1 { print file ": outside a section: " $0; bad = 1 }
    END { exit bad }' <<<"$text" || fail "an assumption outside a section is an axiom"
done
for file in $(grep '\.v$' _CoqProject); do
  [ -f "$file" ] || fail "$file is in _CoqProject, but not here"
  [ "${file%.v}.vo" -nt "$file" ] || fail "$file is newer than what was checked"
done

# Every theorem of the table is there, and rests on no axiom.
names=$(grep '^|' README.md | grep -oE '`[a-z]\w*_\w+`' | tr -d '`' | sort -u)
[ "$(wc -l <<<"$names")" -ge 25 ] || fail "README.md names fewer theorems than there are properties"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
{
  echo "From ODB Require $(sed -n 's/\.v$//p' _CoqProject | grep -v '^Extract$' | tr '\n' ' ')."
  for file in $(grep '\.v$' _CoqProject | grep -v '^Extract.v$'); do echo "Import ${file%.v}."; done
  # One question for all of them: what they share is walked through once.
  echo "Definition everything := ($(paste -sd, <<<"$names"))."
  echo "Print Assumptions everything."
} >"$work/audit.v"
coqc -Q . ODB "$work/audit.v" >"$work/out" 2>"$work/err" || fail "$(cat "$work/err")"
grep -q '^Closed under the global context$' "$work/out" || fail "a theorem rests on an axiom: $(head -20 "$work/out")"

# And every main theorem is in the table.
for name in $(grep -hoE '^Theorem \w+' *.v | cut -d' ' -f2); do
  grep -q "\`$name\`" README.md || fail "README.md does not name the theorem $name"
done
echo "audit: $(wc -l <<<"$names") theorems, no axioms, no gaps"
