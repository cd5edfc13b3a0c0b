//! The GGUF format of llama.cpp: typed metadata and named tensors in one file, whose contents are not trusted.
//!
//! A file begins with `GGUF`, the version (3), and the numbers of tensors and of metadata. Metadata, entries of tensors
//! and aligned data follow. The format is described in `docs/gguf.md` of the project ggml.

mod blocks;
mod file;
mod header;
mod pre_tokenizer;
#[cfg(feature = "text")]
mod tokenizer;
mod value;

pub use blocks::GgufType;
pub use file::GgufFile;
pub use pre_tokenizer::{pre_tokenizer, pre_tokenizer_name};
#[cfg(feature = "text")]
pub(crate) use tokenizer::tokenizer_json;
pub use value::{GgufValue, put_text};

/// The first bytes of a file.
pub const MAGIC: [u8; 4] = *b"GGUF";
/// The version that is written.
pub const VERSION: u32 = 3;
/// The alignment of data unless metadata sets another, in bytes.
pub const ALIGNMENT: u64 = 32;

/// The kinds of tokens in `tokenizer.ggml.token_type`.
pub mod token_kind {
    /// A token of texts.
    pub const NORMAL: i32 = 1;
    /// The token in place of unknown text.
    pub const UNKNOWN: i32 = 2;
    /// A special token, such as the end of a text.
    pub const CONTROL: i32 = 3;
    /// An added token that stands for text.
    pub const USER_DEFINED: i32 = 4;
    /// A row of the embedding without a token.
    pub const UNUSED: i32 = 5;
    /// A single byte.
    pub const BYTE: i32 = 6;
}
