#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every endpoint with curl and nothing else: the body that it takes, and where the answer has what was asked for.
#
#   vllm serve Qwen/Qwen3-Omni-30B-A3B-Instruct --omni
#   examples/online/curl.sh chat | chat-speech | chat-stream | chat-image FILE | speech | voices     a model that speaks
#   examples/online/curl.sh image | image-stream | image-edit FILE | chat-paint                      a model that paints
#   examples/online/curl.sh video                                                              a model that makes videos
#   examples/online/curl.sh models | health | metrics                                                          any model
#
# URL says where the server is, OUT where files go, KEY is the server's --api-key; SIZE and STEPS are for painters.
set -euo pipefail
URL=${URL:-http://localhost:8000}
OUT=${OUT:-.}
KEY=${KEY:-none}
SIZE=${SIZE:-1024x768}
STEPS=${STEPS:-20}

ask() { curl -sSN --fail-with-body -H "Authorization: Bearer $KEY" "$URL$@"; }
# JSON, with ' in place of " so that it can be read here.
post() { tr "'" '"' <<< "$2" | ask "$1" -H "Content-Type: application/json" -d @-; }
# The first field of this name in a JSON answer, which is a text.
field() { grep -o "\"$1\":\"[^\"]*\"" | sed -n '1s/^[^:]*:"\(.*\)"$/\1/p'; }

QUESTION="'messages': [{'role': 'user', 'content': 'Why is the sea blue?'}]"
PICTURE="'prompt': 'A lighthouse.', 'size': '$SIZE', 'num_inference_steps': $STEPS, 'seed': 7"
case "${1:-help}" in
  models | voices) ask "/v1/${1/voices/audio/voices}" ;;
  health | metrics) ask "/$1" ;;
  chat) post /v1/chat/completions "{$QUESTION, 'max_tokens': 64}" ;;
  chat-speech)
    post /v1/chat/completions "{$QUESTION, 'modalities': ['audio'], 'audio': {'format': 'wav'}}" |
      field data | base64 -d > "$OUT/answer.wav" ;;
  chat-stream) # One line a piece: text in delta.content, 24 kHz pcm16 in delta.audio.data.
    post /v1/chat/completions "{$QUESTION, 'modalities': ['text', 'audio'], 'stream': true}" ;;
  chat-image)
    url="data:image/png;base64,$(base64 -w 0 "$2")"
    post /v1/chat/completions "{'max_tokens': 64, 'messages': [{'role': 'user', 'content': [
      {'type': 'text', 'text': 'What is this?'}, {'type': 'image_url', 'image_url': {'url': '$url'}}]}]}" ;;
  speech) # The file comes while it is made: into a player, with "| ffplay -".
    post /v1/audio/speech "{'input': 'Good morning.', 'voice': 'alloy'}" > "$OUT/speech.mp3" ;;
  image) post /v1/images/generations "{$PICTURE}" | field b64_json | base64 -d > "$OUT/image.png" ;;
  image-stream) post /v1/images/generations "{$PICTURE, 'stream': true, 'partial_images': 2}" ;;
  image-edit)
    ask /v1/images/edits -F "image=@$2" -F "prompt=At night." -F "size=$SIZE" -F "num_inference_steps=$STEPS" |
      field b64_json | base64 -d > "$OUT/edited.png" ;;
  chat-paint) # Settings of a diffusion model come in a field that is named extra_body.
    post /v1/chat/completions "{'messages': [{'role': 'user', 'content': 'A lighthouse.'}], 'extra_body':
      {'width': ${SIZE%x*}, 'height': ${SIZE#*x}, 'num_inference_steps': $STEPS, 'seed': 7}}" |
      field url | cut -d , -f 2 | base64 -d > "$OUT/painting.png" ;;
  video)
    id=$(post /v1/videos "{${PICTURE/A lighthouse/A boat leaves}, 'seconds': 1}" | field id)
    while ask "/v1/videos/$id" | field status | grep -q -e queued -e in_progress; do sleep "${INTERVAL:-1}"; done
    ask "/v1/videos/$id/content" > "$OUT/video.mp4"
    ask "/v1/videos/$id" -X DELETE ;;
  *) sed -n '3,/^set/s/^# \{0,1\}//p' "$0" ;;
esac
