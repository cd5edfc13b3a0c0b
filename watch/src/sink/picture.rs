//! [`Picture`]: a picture of bytes.

use numcore::{Error, Result, Within};

/// A picture: rows from the top, pixels from the left, one byte per channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    width: u32,
    height: u32,
    channels: u8,
    pixels: Vec<u8>,
}

impl Picture {
    /// Makes a picture of 1 channel (grey), 3 (RGB) or 4 (RGBA) from `pixels: [height, width, channels]`.
    ///
    /// # Errors
    /// An error if there are other channels, a side is 0, or the number of bytes is not width × height × channels.
    #[track_caller]
    pub fn new(width: u32, height: u32, channels: u8, pixels: Vec<u8>) -> Result<Self> {
        let bytes = u64::from(width).checked_mul(u64::from(height)).and_then(|n| n.checked_mul(u64::from(channels)));
        if !matches!(channels, 1 | 3 | 4) {
            let allowed = "1 (grey), 3 (RGB) or 4 (RGBA) for a picture";
            return Err(Error::range("Picture::new", "number of channels", u32::from(channels), allowed)).at_caller();
        }
        if width == 0 || height == 0 || bytes != Some(pixels.len() as u64) {
            let why = format!("{} bytes are no picture of {width} × {height} × {channels}", pixels.len());
            return Err(Error::lengths("Picture::new", &[pixels.len()], why)).at_caller();
        }
        Ok(Picture { width, height, channels, pixels })
    }

    /// Makes a picture of numbers, 0 black and 1 white; others are clamped, and NaN is black.
    ///
    /// # Errors
    /// The errors of [`new`](Picture::new).
    #[track_caller]
    pub fn of_numbers(width: u32, height: u32, channels: u8, numbers: &[f32]) -> Result<Self> {
        // A cast of a NaN is 0.
        let pixels = numbers.iter().map(|x| (x.clamp(0.0, 1.0) * 255.0).round() as u8).collect();
        Picture::new(width, height, channels, pixels)
    }

    /// The number of pixels in a row.
    pub fn width(&self) -> u32 {
        self.width
    }

    /// The number of rows.
    pub fn height(&self) -> u32 {
        self.height
    }

    /// The number of bytes of a pixel.
    pub fn channels(&self) -> u8 {
        self.channels
    }

    /// All bytes, row by row.
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
    }

    /// Encodes the picture as a PNG file.
    pub fn to_png(&self) -> Vec<u8> {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, self.width, self.height);
        encoder.set_color(match self.channels {
            1 => png::ColorType::Grayscale,
            3 => png::ColorType::Rgb,
            _ => png::ColorType::Rgba,
        });
        let written = encoder.write_header().and_then(|mut writer| writer.write_image_data(&self.pixels));
        // Writing to a vector cannot fail, and a picture has exactly the bytes of its width, height and channels.
        if written.is_ok() { file } else { Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    #[test]
    fn a_picture_is_in_its_file() {
        for channels in [1, 3, 4] {
            let pixels: Vec<u8> = (0..8 * channels).collect();
            let file = Picture::new(4, 2, channels, pixels.clone()).unwrap().to_png();
            let mut reader = png::Decoder::new(Cursor::new(file)).read_info().unwrap();
            let mut read = vec![0; pixels.len()];
            let info = reader.next_frame(&mut read).unwrap();
            assert_eq!((info.width, info.height, info.color_type.samples()), (4, 2, channels.into()));
            assert_eq!(read, pixels);
        }
    }

    #[test]
    fn what_is_no_picture_is_refused() {
        for (width, height, channels, bytes) in [(2, 2, 2, 8), (0, 4, 1, 0), (2, 2, 1, 5), (u32::MAX, u32::MAX, 4, 0)] {
            let error = Picture::new(width, height, channels, vec![0; bytes]).unwrap_err().to_string();
            assert!(error.contains("picture"), "{error}");
        }
        let clamped = Picture::of_numbers(4, 1, 1, &[-1.0, 0.5, 2.0, f32::NAN]).unwrap();
        assert_eq!(clamped.pixels(), [0, 128, 255, 0]);
    }
}
