//! PNG files, as far as 8 bits per channel need them.

use std::io::Write;

use flate2::{Compression, Crc, write::ZlibEncoder};

use super::Picture;

const SIGNATURE: [u8; 8] = [0x89, b'P', b'N', b'G', 0x0d, 0x0a, 0x1a, 0x0a];

/// The file of a picture: a header, one chunk of compressed rows, the end.
pub fn encode(image: &Picture) -> Vec<u8> {
    let colour = match image.channels() {
        1 => 0,
        3 => 2,
        _ => 6,
    };
    let mut header = Vec::with_capacity(13);
    header.extend(image.width().to_be_bytes());
    header.extend(image.height().to_be_bytes());
    header.extend([8, colour, 0, 0, 0]);
    let mut file = SIGNATURE.to_vec();
    chunk(&mut file, b"IHDR", &header);
    chunk(&mut file, b"IDAT", &compressed_rows(image));
    chunk(&mut file, b"IEND", &[]);
    file
}

/// Rows, each after the byte that names its filter: none.
fn compressed_rows(image: &Picture) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
    let row = image.width() as usize * usize::from(image.channels());
    let written = image.pixels().chunks(row).try_for_each(|row| {
        encoder.write_all(&[0])?;
        encoder.write_all(row)
    });
    // Writing to a vector cannot fail.
    written.and_then(|()| encoder.finish()).unwrap_or_default()
}

fn chunk(file: &mut Vec<u8>, name: &[u8; 4], data: &[u8]) {
    file.extend((data.len() as u32).to_be_bytes());
    file.extend(name);
    file.extend(data);
    let mut crc = Crc::new();
    crc.update(name);
    crc.update(data);
    file.extend(crc.sum().to_be_bytes());
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use flate2::read::ZlibDecoder;

    use super::*;

    #[test]
    fn a_picture_is_in_its_file() {
        let pixels: Vec<u8> = (0..24).collect();
        let file = Picture::new(4, 2, 3, pixels.clone()).unwrap().to_png();
        assert_eq!(file[..8], SIGNATURE);
        assert_eq!(file[8..29], *b"\0\0\0\x0dIHDR\0\0\0\x04\0\0\0\x02\x08\x02\0\0\0");
        let length = u32::from_be_bytes(file[33..37].try_into().unwrap()) as usize;
        assert_eq!(file[37..41], *b"IDAT");
        let mut rows = Vec::new();
        ZlibDecoder::new(&file[41..41 + length]).read_to_end(&mut rows).unwrap();
        assert_eq!(rows, [&[0], &pixels[..12], &[0], &pixels[12..]].concat());
        // The checksum of an empty last chunk is a constant of the format.
        assert_eq!(file[file.len() - 12..], *b"\0\0\0\0IEND\xae\x42\x60\x82");
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
