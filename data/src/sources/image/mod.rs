//! Folders of images, and transforms of images (feature `image`).
//!
//! Random transforms take the generator from [`Loader::augment`](crate::Loader::augment). It is keyed by example and
//! epoch, so no number of workers or ranks changes an image.

mod color;
mod random;

use std::path::{Path, PathBuf};

use ::image::{ImageReader, RgbImage, imageops};
use numcore::{Error, Result, Shape, Within, rng::Philox};

pub use random::{ColorJitter, RandAugment};

use super::text::{files_within, folders_in};
use crate::{Array, Dataset};

/// An image of three channels (red, green, blue) of 8 bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    pixels: RgbImage,
}

impl Image {
    /// Makes an image from rows of pixels, three bytes each.
    ///
    /// # Errors
    /// Fails if the number of bytes is not `3 · width · height`.
    #[track_caller]
    pub fn new(width: u32, height: u32, pixels: Vec<u8>) -> Result<Self> {
        let count = pixels.len();
        let pixels = RgbImage::from_raw(width, height, pixels)
            .filter(|_| count as u64 == 3 * u64::from(width) * u64::from(height));
        let why = || format!("{count} bytes are no {width}×{height} pixels of 3");
        pixels.map(|pixels| Image { pixels }).ok_or_else(|| Error::lengths("Image", &[count], why())).at_caller()
    }

    /// Decodes the bytes of a PNG or JPEG file. Errors name it `what`.
    ///
    /// # Errors
    /// Fails if the bytes are no image.
    #[track_caller]
    pub fn decode(what: &str, bytes: &[u8]) -> Result<Self> {
        let reader = ImageReader::new(std::io::Cursor::new(bytes)).with_guessed_format();
        let reader = reader.map_err(|e| Error::format(what, e.to_string())).at_caller()?;
        let image = reader
            .decode()
            .map_err(|e| Error::format(what, format!("it is no image that can be read: {e}")))
            .at_caller()?;
        Ok(Image { pixels: image.to_rgb8() })
    }

    /// Reads a PNG or JPEG file.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or is no image.
    #[track_caller]
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|e| Error::io(path, e)).at_caller()?;
        Image::decode(&path.display().to_string(), &bytes)
    }

    /// The width and the height in pixels.
    pub fn size(&self) -> (u32, u32) {
        self.pixels.dimensions()
    }

    /// The rows of pixels, three bytes each.
    pub fn bytes(&self) -> &[u8] {
        self.pixels.as_raw()
    }

    /// The image in another size, by linear interpolation over all pixels that a new pixel covers.
    ///
    /// # Errors
    /// Fails if a side of either image is 0.
    #[track_caller]
    pub fn resize(&self, width: u32, height: u32) -> Result<Image> {
        let (from_width, from_height) = self.size();
        if [width, height, from_width, from_height].contains(&0) {
            let why = format!("{from_width}×{from_height} to {width}×{height}: no side may be 0");
            return Err(Error::shape("Image::resize", &[sides(from_height, from_width), sides(height, width)], why))
                .at_caller();
        }
        Ok(Image { pixels: imageops::resize(&self.pixels, width, height, imageops::FilterType::Triangle) })
    }

    /// The image with its shorter side `side` pixels long, and its proportions kept.
    ///
    /// # Errors
    /// Fails if a side is 0.
    #[track_caller]
    pub fn resize_shorter(&self, side: u32) -> Result<Image> {
        let (width, height) = self.size();
        let shorter = width.min(height).max(1);
        let scaled = |x: u32| (u64::from(x) * u64::from(side) / u64::from(shorter)).try_into().unwrap_or(u32::MAX);
        self.resize(scaled(width), scaled(height))
    }

    /// The piece of the image with its top left corner at (`left`, `top`).
    ///
    /// # Errors
    /// Fails if the piece is not within the image.
    #[track_caller]
    pub fn crop(&self, left: u32, top: u32, width: u32, height: u32) -> Result<Image> {
        let within = |from: u32, len: u32, size: u32| from.checked_add(len).is_some_and(|end| end <= size);
        let (all_width, all_height) = self.size();
        if !within(left, width, all_width) || !within(top, height, all_height) {
            let why = format!("{width}×{height} from ({left}, {top}) is not within {all_width}×{all_height}");
            return Err(Error::shape("Image::crop", &[sides(all_height, all_width), sides(height, width)], why))
                .at_caller();
        }
        Ok(Image { pixels: imageops::crop_imm(&self.pixels, left, top, width, height).to_image() })
    }

    /// The piece in the middle of the image.
    ///
    /// # Errors
    /// Fails if the image is smaller than the piece.
    #[track_caller]
    pub fn center_crop(&self, width: u32, height: u32) -> Result<Image> {
        let (all_width, all_height) = self.size();
        self.crop(all_width.saturating_sub(width) / 2, all_height.saturating_sub(height) / 2, width, height)
    }

    /// A piece at a random place.
    ///
    /// # Errors
    /// Fails if the image is smaller than the piece.
    #[track_caller]
    pub fn random_crop(&self, width: u32, height: u32, rng: &mut Philox) -> Result<Image> {
        let (all_width, all_height) = self.size();
        let mut from = |all: u32, part: u32| rng.below(u64::from(all.saturating_sub(part)) + 1) as u32;
        let (left, top) = (from(all_width, width), from(all_height, height));
        self.crop(left, top, width, height)
    }

    /// A random piece of 8 to 100 % of the area and proportions of 3:4 to 4:3, resized: the usual augmentation for
    /// ImageNet.
    ///
    /// # Errors
    /// Fails if a size is 0.
    #[track_caller]
    #[doc(alias("RandomResizedCrop"))]
    pub fn random_resized_crop(&self, width: u32, height: u32, rng: &mut Philox) -> Result<Image> {
        let (all_width, all_height) = self.size();
        let area = f64::from(all_width) * f64::from(all_height);
        // Ten attempts, as torchvision makes; then the whole image.
        for _ in 0..10 {
            let part = area * (0.08 + 0.92 * rng.uniform());
            // Proportions are drawn by their logarithm, so that portrait and landscape pieces are equally frequent.
            let ratio = libm::pow(4.0 / 3.0, 2.0 * rng.uniform() - 1.0);
            let (w, h) = ((part * ratio).sqrt().round() as u32, (part / ratio).sqrt().round() as u32);
            if (1..=all_width).contains(&w) && (1..=all_height).contains(&h) {
                return self.random_crop(w, h, rng)?.resize(width, height).at_caller();
            }
        }
        self.resize(width, height)
    }

    /// The image or its mirror image, each with probability ½.
    #[doc(alias("RandomHorizontalFlip"))]
    pub fn random_flip(self, rng: &mut Philox) -> Image {
        if rng.bernoulli(0.5) { self.flipped() } else { self }
    }

    /// The mirror image: left is right.
    pub fn flipped(&self) -> Image {
        Image { pixels: imageops::flip_horizontal(&self.pixels) }
    }

    /// The values `[3, H, W]` of `f32` as `(x / 255 − mean) / std`, channel by channel.
    ///
    /// # Errors
    /// Fails if a standard deviation is 0.
    #[track_caller]
    pub fn normalized(&self, mean: [f32; 3], std: [f32; 3]) -> Result<Array> {
        if std.contains(&0.0) {
            let allowed = format!("above 0 to divide by, of {std:?}");
            return Err(Error::range("Image::normalized", "standard deviation", 0.0, allowed)).at_caller();
        }
        let (width, height) = self.size();
        let channel =
            |c: usize| self.bytes().iter().skip(c).step_by(3).map(move |&x| (f32::from(x) / 255.0 - mean[c]) / std[c]);
        Array::new([3, height as usize, width as usize], (0..3).flat_map(channel).collect())
    }
}

/// A folder with a folder of images per class: torchvision's `ImageFolder`. Classes are numbered in the order of their
/// names.
///
/// ```no_run
/// use data::{Loader, sources::image::ImageFolder};
/// # fn main() -> numcore::Result<()> {
/// let photos = ImageFolder::open("photos/train")?;
/// let loader = Loader::new(photos).batch(64).shuffle(7).workers(4).augment(7, |(image, class), rng| {
///     let image = image.random_resized_crop(224, 224, rng)?.random_flip(rng);
///     Ok((image.normalized([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])?, class))
/// });
/// let loader = loader.stack();
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageFolder {
    classes: Vec<String>,
    images: Vec<(PathBuf, i64)>,
}

/// File extensions of images that torchvision reads and this crate does not.
const NOT_READ: [&str; 7] = ["bmp", "gif", "pgm", "ppm", "tif", "tiff", "webp"];

impl ImageFolder {
    /// Finds the images `*.png`, `*.jpg` and `*.jpeg` in the folders of a folder, in the order of their paths.
    ///
    /// # Errors
    /// Fails if a folder cannot be read, an image has another format, or there is no image. A class without an image is
    /// an error too: without it, class numbers would differ from those of another part of the data.
    #[track_caller]
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let ends_with = |path: &Path, ends: &[&str]| {
            let end = path.extension().and_then(|end| end.to_str()).map(str::to_ascii_lowercase);
            end.is_some_and(|end| ends.contains(&&*end))
        };
        let class = |path: &Path| {
            let mut parts = path.strip_prefix(folder).ok()?.components();
            let first = parts.next()?.as_os_str().to_str()?.to_owned();
            parts.next().filter(|_| !first.starts_with('.')).map(|_| first)
        };
        let files = files_within(folder).at_caller()?.into_iter();
        let mut found: Vec<(PathBuf, String)> =
            files.filter_map(|path| class(&path).map(|class| (path, class))).collect();
        if let Some((path, _)) = found.iter().find(|(path, _)| ends_with(path, &NOT_READ)) {
            let why = "it is an image of a kind that is not read: convert it to PNG, or take it out of the folder";
            return Err(Error::format(path.display().to_string(), why)).at_caller();
        }
        found.retain(|(path, _)| ends_with(path, &["png", "jpg", "jpeg"]));
        if found.is_empty() {
            let why = "there is no folder with an image *.png, *.jpg or *.jpeg within";
            return Err(Error::format(folder.display().to_string(), why)).at_caller();
        }
        let classes = folders_in(folder).at_caller()?;
        let empty: Vec<&str> =
            classes.iter().map(String::as_str).filter(|&name| found.iter().all(|(_, class)| class != name)).collect();
        if !empty.is_empty() {
            let why = format!("no image *.png, *.jpg or *.jpeg for the classes {}", empty.join(", "));
            return Err(Error::format(folder.display().to_string(), why)).at_caller();
        }
        let number = |class: &String| classes.partition_point(|other| other < class) as i64;
        let images = found.iter().map(|(path, class)| (path.clone(), number(class))).collect();
        Ok(ImageFolder { classes, images })
    }

    /// The names of the classes; a label is an index into this list.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// The class of each image, without reading one: for [`split`](crate::split).
    pub fn labels(&self) -> Vec<i64> {
        self.images.iter().map(|(_, class)| *class).collect()
    }
}

impl Dataset for ImageFolder {
    type Example = (Image, i64);

    fn len(&self) -> usize {
        self.images.len()
    }

    fn get(&self, index: usize) -> Result<(Image, i64)> {
        crate::dataset::check_index("ImageFolder", index, self.len())?;
        let (path, class) = &self.images[index];
        Ok((Image::open(path)?, *class))
    }
}

/// The shape of an image, without its channels.
fn sides(height: u32, width: u32) -> Shape {
    [height as usize, width as usize].into()
}
