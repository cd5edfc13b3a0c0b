//! Models against transformers and peft, whose values are in `references/`; files that are malformed; many ranks.

mod common;
mod decoders;
mod folders;
mod ranks;
