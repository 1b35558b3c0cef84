#!/bin/sh
# One question about every text file of a folder: requests by jq, answers by ds4cli, a table by jq.
#
#   sh examples/batch.sh FOLDER "What is this about?" [ds4cli options, such as -m MODEL]
#
# The question stands last, so that several questions about one file would share its reading.
set -eu
folder=$1 question=$2
shift 2

for file in "$folder"/*.txt; do
    jq -nc --arg id "$file" --rawfile text "$file" --arg question "$question" \
        '{custom_id: $id, prompt: ($text + "\n" + $question)}'
done |
    ds4cli generate --batch - -q "$@" |
    jq -r '[.custom_id, (.response.body.choices[0].message.content // .error.message)] | @tsv'
