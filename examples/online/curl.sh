#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every endpoint with curl only: the body of the request, and the field of the answer with the result.
#
#   vllm serve shapes --omni
#   examples/online/curl.sh chat | chat-speech | chat-stream | chat-image FILE | speech | voices         a speech model
#   examples/online/curl.sh transcribe FILE                                     a model that understands speech
#   examples/online/curl.sh voice FILE TRANSCRIPT                               a model that imitates voices, such as CSM
#   examples/online/curl.sh image | image-stream | image-edit FILE | chat-diffusion                      an image model
#   examples/online/curl.sh video                                                                          a video model
#   examples/online/curl.sh models | health | metrics                                                          any model
#
# URL: the server; OUT: the folder for files; KEY: the server's --api-key; SIZE and STEPS: for image and video models.
set -euo pipefail
URL=${URL:-http://localhost:8000}
OUT=${OUT:-.}
KEY=${KEY:-none}
SIZE=${SIZE:-1024x768}
STEPS=${STEPS:-20}

send() { curl -sSN --fail-with-body -H "Authorization: Bearer $KEY" "$URL$@"; }
# JSON, written with ' in place of ".
post() { tr "'" '"' <<< "$2" | send "$1" -H "Content-Type: application/json" -d @-; }
# The first string field of this name in a JSON answer.
field() { grep -o "\"$1\":\"[^\"]*\"" | sed -n '1s/^[^:]*:"\(.*\)"$/\1/p'; }

QUESTION="'messages': [{'role': 'user', 'content': 'Why is the sea blue?'}]"
IMAGE="'prompt': 'A lighthouse.', 'size': '$SIZE', 'num_inference_steps': $STEPS, 'seed': 7"
case "${1:-help}" in
  models | voices) send "/v1/${1/voices/audio/voices}" ;;
  health | metrics) send "/$1" ;;
  chat) post /v1/chat/completions "{$QUESTION, 'max_tokens': 64}" ;;
  chat-speech)
    post /v1/chat/completions "{$QUESTION, 'modalities': ['audio'], 'audio': {'format': 'wav'}}" |
      field data | base64 -d > "$OUT/answer.wav" ;;
  chat-stream) # One line for each delta: text in delta.content, 24 kHz pcm16 in delta.audio.data.
    post /v1/chat/completions "{$QUESTION, 'modalities': ['text', 'audio'], 'stream': true}" ;;
  chat-image)
    url="data:image/png;base64,$(base64 -w 0 "$2")"
    post /v1/chat/completions "{'max_tokens': 64, 'messages': [{'role': 'user', 'content': [
      {'type': 'text', 'text': 'What is this?'}, {'type': 'image_url', 'image_url': {'url': '$url'}}]}]}" ;;
  speech) # The file is sent while it is made; for a player: "| ffplay -".
    post /v1/audio/speech "{'input': 'Good morning.', 'voice': 'alloy'}" > "$OUT/speech.mp3" ;;
  transcribe) send /v1/audio/transcriptions -F "file=@$2" -F response_format=text ;;
  voice) # A recording and what is said in it; "voice" of a request names it.
    id=$(send /v1/audio/voices -F "audio_sample=@$2" -F "ref_text=$3" -F name=mine -F "consent=I speak." | field id)
    post /v1/audio/speech/batch "{'inputs': ['Good morning.'], 'voice': 'mine'}" |
      field audio | base64 -d > "$OUT/voice.mp3"
    send "/v1/audio/voices/$id" -X DELETE ;;
  image) post /v1/images/generations "{$IMAGE}" | field b64_json | base64 -d > "$OUT/image.png" ;;
  image-stream) post /v1/images/generations "{$IMAGE, 'stream': true, 'partial_images': 2}" ;;
  image-edit)
    send /v1/images/edits -F "image=@$2" -F "prompt=At night." -F "size=$SIZE" -F "num_inference_steps=$STEPS" |
      field b64_json | base64 -d > "$OUT/edited.png" ;;
  chat-diffusion) # Settings of a diffusion model are in a field named extra_body.
    post /v1/chat/completions "{'messages': [{'role': 'user', 'content': 'A lighthouse.'}], 'extra_body':
      {'width': ${SIZE%x*}, 'height': ${SIZE#*x}, 'num_inference_steps': $STEPS, 'seed': 7}}" |
      field url | cut -d , -f 2 | base64 -d > "$OUT/diffusion.png" ;;
  video)
    id=$(post /v1/videos "{${IMAGE/A lighthouse/A boat leaves}, 'seconds': 1}" | field id)
    while send "/v1/videos/$id" | field status | grep -q -e queued -e in_progress; do sleep "${INTERVAL:-1}"; done
    send "/v1/videos/$id/content" > "$OUT/video.mp4"
    send "/v1/videos/$id" -X DELETE ;;
  *) sed -n '3,/^set/s/^# \{0,1\}//p' "$0" ;;
esac
