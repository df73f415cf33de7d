# SPDX-License-Identifier: Apache-2.0
"""What crosses processes: messages, payloads, credit. See docs/design/messages.md."""
