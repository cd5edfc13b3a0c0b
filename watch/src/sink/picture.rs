//! [`Picture`]: a picture of bytes.

use numcore::{Error, Result};

use super::png;

/// A picture: rows from the top, pixels from the left, one byte per channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    width: u32,
    height: u32,
    channels: u8,
    pixels: Vec<u8>,
}

impl Picture {
    /// A picture of 1 channel (grey), 3 (RGB) or 4 (RGBA), whose channels of a pixel are adjacent.
    ///
    /// # Errors
    /// If there are other channels, a side is 0, or the number of bytes is not width × height × channels.
    pub fn new(width: u32, height: u32, channels: u8, pixels: Vec<u8>) -> Result<Self> {
        let bytes = u64::from(width).checked_mul(u64::from(height)).and_then(|n| n.checked_mul(u64::from(channels)));
        let wrong = |why: String| Err(Error::argument("Picture::new", why));
        if !matches!(channels, 1 | 3 | 4) {
            return wrong(format!("{channels} channels; a picture has 1 (grey), 3 (RGB) or 4 (RGBA)"));
        }
        if width == 0 || height == 0 || bytes != Some(pixels.len() as u64) {
            return wrong(format!("{} bytes are no picture of {width} × {height} × {channels}", pixels.len()));
        }
        Ok(Picture { width, height, channels, pixels })
    }

    /// A picture of numbers, 0 black and 1 white; others are clamped, and NaN is black.
    ///
    /// # Errors
    /// If it would be no picture, as in [`new`](Picture::new).
    pub fn of_numbers(width: u32, height: u32, channels: u8, numbers: &[f32]) -> Result<Self> {
        // A cast of a NaN is 0.
        let pixels = numbers.iter().map(|x| (x.clamp(0.0, 1.0) * 255.0).round() as u8).collect();
        Picture::new(width, height, channels, pixels)
    }

    /// Pixels in a row.
    pub fn width(&self) -> u32 {
        self.width
    }

    /// Rows.
    pub fn height(&self) -> u32 {
        self.height
    }

    /// Bytes of a pixel.
    pub fn channels(&self) -> u8 {
        self.channels
    }

    /// All bytes, row by row.
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
    }

    /// The picture as a PNG file.
    pub fn to_png(&self) -> Vec<u8> {
        png::encode(self)
    }
}
