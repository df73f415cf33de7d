# SPDX-License-Identifier: Apache-2.0
"""The domain of the shipped checkpoints, without a model: sentences about shapes, pictures and recordings of them."""
