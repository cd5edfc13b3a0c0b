//! Layers, losses, initialization, modules and their states.

mod attention;
mod attention_programs;
#[path = "../common/mod.rs"]
mod common;
mod devices;
mod errors;
mod functional;
mod golden_layers;
mod golden_models;
mod init;
mod layers;
mod linear_cross_entropy;
mod losses;
mod losses_of_pairs;
mod losses_of_preferences;
mod module;
mod moe;
mod per_example;
mod reference_layers;
mod safetensors;
mod scores;
mod segments;
mod summary;
