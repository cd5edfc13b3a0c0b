//! What the examples share: a progress bar, a picture of the loss, text as numbers, and a clean end on Ctrl-C.
#![forbid(unsafe_code)]

pub mod plot;
pub mod progress;
pub mod stop;
pub mod text;

/// Something, or what ended the program early.
pub type Outcome<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// The device after `--device`, or the processor: for examples that have no other option.
pub fn device() -> weftgrad::Result<weftgrad::AnyRuntime> {
    let mut arguments = std::env::args().skip(1);
    let device = match (arguments.next().as_deref(), arguments.next()) {
        (None, _) => weftgrad::Device::Cpu,
        (Some("--device"), Some(name)) => name.parse()?,
        _ => return Err(weftgrad::Error::argument("options", "the only option is `--device cpu|wgpu[:N]|cuda[:N]`")),
    };
    device.open()
}
