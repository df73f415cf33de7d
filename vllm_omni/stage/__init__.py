# SPDX-License-Identifier: Apache-2.0
"""A stage's process: the IO thread, and the engines behind one interface. See docs/design/processes.md."""
