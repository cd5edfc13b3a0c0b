//! Datasets in files. A malformed record is an error that names the file and the line or record. Other records stay
//! readable.

#[cfg(feature = "arrow")]
mod arrow;
mod csv;
#[cfg(any(feature = "arrow", feature = "parquet"))]
mod groups;
mod idx;
#[cfg(feature = "image")]
pub mod image;
mod jsonl;
mod npy;
#[cfg(feature = "parquet")]
mod parquet;
mod row;
mod safetensors;
mod tar;
mod text;
#[cfg(feature = "text")]
mod tokenizer;
#[cfg(feature = "audio")]
mod wav;

#[cfg(feature = "arrow")]
pub use arrow::Arrow;
pub use csv::{Csv, CsvRow};
pub use idx::read_idx;
pub use jsonl::JsonLines;
pub use npy::{NpyRows, read_npy, read_npz};
#[cfg(feature = "parquet")]
pub use parquet::Parquet;
pub use row::{Cell, TableRow};
pub use safetensors::SafetensorsRows;
pub use tar::{TarExample, TarShards};
pub use text::{Characters, TextFile, TextFolder, TextLines};
#[cfg(feature = "text")]
pub use tokenizer::Tokenizer;
#[cfg(feature = "audio")]
pub use wav::Wav;
