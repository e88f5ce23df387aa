#!/bin/sh
# Emulates a user who sends one prompt after another, with a pause to read.
set -eu
config=${1:?the first argument is the configuration of the device}
pause_s=${PAUSE_S:-2}
trap 'exit 143' TERM INT

# Runs in the background with a wait, so that a signal takes effect at once.
ask() {
    edgespec generate "$1" --config "$config" --seed "$2" --stats &
    child=$!
    trap 'kill -TERM "$child" 2> /dev/null || true; wait "$child" || true; exit 143' TERM INT
    wait "$child" || echo "the generation failed; trying again" >&2
    echo
}

seed=0
while :; do
    for prompt in \
        'import argparse

def main():
    parser = argparse.ArgumentParser(' \
        '# git commit

> Commit files to the repository.
' \
        'It was a cold morning in November, and the old man'; do
        seed=$((seed + 1))
        ask "$prompt" "$seed"
        sleep "$pause_s" &
        wait $! || true
    done
done
