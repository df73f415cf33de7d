# SPDX-License-Identifier: Apache-2.0
"""What models declare, and the models. See docs/design/feedback.md for those that talk."""
