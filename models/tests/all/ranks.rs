//! Pretrained models on many ranks.
