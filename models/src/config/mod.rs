//! Configurations of models, read from `config.json`.

mod decoder;
mod family;
mod fields;
mod generation_fields;
mod gguf;
mod mixtures;
mod options;
mod rope;
mod rope_scaling;
mod windows;

pub use decoder::DecoderConfig;
pub use family::Family;
pub(crate) use family::FamilyParts;
pub use fields::ConfigFields;
pub(crate) use fields::activation_name;
pub(crate) use fields::check_sizes;
pub(crate) use generation_fields::{UNSUPPORTED, is_generation_field};
pub use mixtures::DecoderMixtures;
pub use options::DecoderOptions;
pub use rope::RopeConfig;
pub use rope_scaling::RopeScaling;
