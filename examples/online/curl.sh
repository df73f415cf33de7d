#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every endpoint with curl and nothing else: the body that it takes, and where the answer has what was asked for.
#
#   vllm serve Qwen/Qwen3-Omni-30B-A3B-Instruct --omni
#   examples/online/curl.sh chat | chat-speech | chat-stream | chat-image FILE | speech | voices     a model that speaks
#   examples/online/curl.sh image | image-stream | image-edit FILE | chat-paint                      a model that paints
#   examples/online/curl.sh video                                                              a model that makes videos
#   examples/online/curl.sh models | health | metrics                                                           any model
#
# URL says where the server is, OUT where files go, KEY is the server's --api-key.
set -euo pipefail
URL=${URL:-http://localhost:8000}
OUT=${OUT:-.}
KEY=${KEY:-none}

get() { curl -sS --fail-with-body -H "Authorization: Bearer $KEY" "$URL$1"; }
post() { curl -sS --fail-with-body -N -H "Authorization: Bearer $KEY" -H 'Content-Type: application/json' "$URL$1" -d @-; }
# The first field of this name in a JSON answer, which is a text.
field() { grep -o "\"$1\":\"[^\"]*\"" | sed -n '1s/^[^:]*:"\(.*\)"$/\1/p'; }

QUESTION='"messages": [{"role": "user", "content": "Why is the sea blue?"}]'
case "${1:-help}" in
  models | health | metrics) get "$(test "$1" = models && echo /v1)/$1" ;;
  chat) echo "{$QUESTION, \"modalities\": [\"text\"], \"max_tokens\": 64}" | post /v1/chat/completions ;;
  chat-speech)
    echo "{$QUESTION, \"modalities\": [\"audio\"], \"audio\": {\"format\": \"wav\"}, \"max_tokens\": 64}" |
      post /v1/chat/completions | field data | base64 -d > "$OUT/answer.wav" ;;
  chat-stream) # One line a piece: text in delta.content, 24 kHz pcm16 in delta.audio.data.
    echo "{$QUESTION, \"modalities\": [\"text\", \"audio\"], \"stream\": true, \"max_tokens\": 64}" |
      post /v1/chat/completions ;;
  chat-image)
    printf '{"modalities": ["text"], "max_tokens": 64, "messages": [{"role": "user", "content": [
      {"type": "text", "text": "What is this?"},
      {"type": "image_url", "image_url": {"url": "data:image/png;base64,%s"}}]}]}' "$(base64 -w 0 "$2")" |
      post /v1/chat/completions ;;
  speech) # The file comes while it is made: into a player, with "| ffplay -".
    echo '{"input": "Good morning.", "response_format": "mp3", "stream_format": "audio"}' |
      post /v1/audio/speech > "$OUT/speech.mp3" ;;
  voices) get /v1/audio/voices ;;
  image)
    echo '{"prompt": "A lighthouse in a storm.", "size": "'"${SIZE:-auto}"'", "seed": 7}' |
      post /v1/images/generations | field b64_json | base64 -d > "$OUT/image.png" ;;
  image-stream)
    echo '{"prompt": "A lighthouse.", "size": "'"${SIZE:-auto}"'", "stream": true, "partial_images": 2}' |
      post /v1/images/generations ;;
  image-edit)
    curl -sS --fail-with-body -H "Authorization: Bearer $KEY" "$URL/v1/images/edits" \
      -F image=@"$2" -F 'prompt=The same at night.' -F "size=${SIZE:-auto}" -F seed=7 |
      field b64_json | base64 -d > "$OUT/edited.png" ;;
  chat-paint) # Settings of a diffusion model come in a field that is named extra_body.
    echo '{"messages": [{"role": "user", "content": "A lighthouse."}], "extra_body": {"seed": 7}}' |
      post /v1/chat/completions | field url | cut -d , -f 2 | base64 -d > "$OUT/painting.png" ;;
  video)
    id=$(echo '{"prompt": "A boat leaves.", "seed": 7}' | post /v1/videos | field id)
    while get "/v1/videos/$id" | field status | grep -q -e queued -e in_progress; do sleep "${INTERVAL:-1}"; done
    get "/v1/videos/$id/content" > "$OUT/video.mp4"
    curl -sS --fail-with-body -X DELETE -H "Authorization: Bearer $KEY" "$URL/v1/videos/$id" ;;
  *) sed -n '3,/^set/s/^# \{0,1\}//p' "$0" ;;
esac
