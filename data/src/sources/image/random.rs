//! Placement of pixels, and random augmentations as values.

use ::image::{Rgb, RgbImage, imageops};
use numcore::{Error, Result, Within, rng::Philox};

use super::Image;

impl Image {
    /// The image with a border of `border` pixels of one colour on each side. Before
    /// [`random_crop`](Image::random_crop), this is the usual augmentation for CIFAR.
    ///
    /// ```
    /// # use data::{random::keyed, sources::image::Image};
    /// # fn main() -> numcore::Result<()> {
    /// let (image, mut rng) = (Image::new(32, 32, vec![9; 3072])?, keyed(7, 0, 41));
    /// let shifted = image.padded(4, [0; 3])?.random_crop(32, 32, &mut rng)?;
    /// assert_eq!(shifted.size(), (32, 32));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Fails if the sides do not fit 32 bits, or the pixels do not fit memory.
    #[track_caller]
    #[doc(alias("RandomCrop"))]
    pub fn padded(&self, border: u32, color: [u8; 3]) -> Result<Image> {
        let (width, height) = self.size();
        let side = |side: u32| side.checked_add(border.checked_mul(2)?);
        let fits = |(w, h): &(u32, u32)| 3 * u128::from(*w) * u128::from(*h) <= isize::MAX as u128 / 2;
        let Some((w, h)) = side(width).zip(side(height)).filter(fits) else {
            return Err(Error::range("Image::padded", "border", border, "less, for memory to hold the pixels"))
                .at_caller();
        };
        let mut pixels = RgbImage::from_pixel(w, h, Rgb(color));
        imageops::replace(&mut pixels, &self.pixels, border.into(), border.into());
        Ok(Image { pixels })
    }

    /// The image upside down, as a mirror image.
    #[doc(alias("RandomVerticalFlip"))]
    pub fn flipped_vertically(&self) -> Image {
        Image { pixels: imageops::flip_vertical(&self.pixels) }
    }

    /// The image turned by `degrees` against the clock around its centre, without interpolation. Pixels from outside
    /// have one colour.
    pub fn rotated(&self, degrees: f64, color: [u8; 3]) -> Image {
        let (sin, cos) = (libm::sin(degrees.to_radians()), libm::cos(degrees.to_radians()));
        self.affine([cos, -sin, 0.0, sin, cos, 0.0], color)
    }

    /// The image whose pixel at `(x, y)` is the one at `(ax + by + c, dx + ey + f)`, without interpolation. Coordinates
    /// are those of pixel centres, counted from the centre of the image. Pixels from outside have one colour.
    #[doc(alias("RandomAffine"))]
    pub fn affine(&self, [a, b, c, d, e, f]: [f64; 6], color: [u8; 3]) -> Image {
        let (width, height) = self.size();
        let half = |side: u32| f64::from(side) / 2.0;
        let pixel = |x: u32, y: u32| {
            let (u, v) = (f64::from(x) + 0.5 - half(width), f64::from(y) + 0.5 - half(height));
            let x = (a * u + b * v + c + half(width) - 0.5).round_ties_even();
            let y = (d * u + e * v + f + half(height) - 0.5).round_ties_even();
            let within = (0.0..f64::from(width)).contains(&x) && (0.0..f64::from(height)).contains(&y);
            if within { *self.pixels.get_pixel(x as u32, y as u32) } else { Rgb(color) }
        };
        Image { pixels: RgbImage::from_fn(width, height, pixel) }
    }

    /// The image with probability `p` filled with one colour in a random rectangle. This has 2 to 33 % of the area, and
    /// proportions of 0.3 to 3.3 (Zhong et al. 2017; torchvision's `RandomErasing`, before normalisation).
    #[doc(alias("RandomErasing"))]
    #[doc(alias("cutout"))]
    pub fn random_erased(mut self, p: f64, color: [u8; 3], rng: &mut Philox) -> Image {
        let (width, height) = self.size();
        if !rng.bernoulli(p) {
            return self;
        }
        for _ in 0..10 {
            let area = f64::from(width) * f64::from(height) * (0.02 + 0.31 * rng.uniform());
            let ratio = 0.3 * libm::pow(11.0, rng.uniform());
            let (w, h) = ((area * ratio).sqrt().round() as u32, (area / ratio).sqrt().round() as u32);
            if w < width && h < height {
                let mut from = |all: u32| rng.below(u64::from(all) + 1) as i64;
                let (left, top) = (from(width - w), from(height - h));
                imageops::replace(&mut self.pixels, &RgbImage::from_pixel(w, h, Rgb(color)), left, top);
                break;
            }
        }
        self
    }
}

/// Random changes of colours: torchvision's `ColorJitter`. A factor is drawn from `1 − x` to `1 + x`, or from 0 on for
/// `x` above 1, and a turn of hues from `−hue` to `hue`. The four are applied in a random order.
///
/// ```
/// use data::{random::keyed, sources::image::{ColorJitter, Image}};
/// # fn main() -> numcore::Result<()> {
/// let jitter = ColorJitter { brightness: 0.4, contrast: 0.4, ..Default::default() };
/// let image = jitter.apply(&Image::new(2, 1, vec![10, 20, 30, 40, 50, 60])?, &mut keyed(7, 0, 41))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ColorJitter {
    /// The range of the factor of [`Image::brightness`].
    pub brightness: f32,
    /// The range of the factor of [`Image::contrast`].
    pub contrast: f32,
    /// The range of the factor of [`Image::saturation`].
    pub saturation: f32,
    /// The range of the turn of [`Image::hue`], at most ½.
    pub hue: f32,
}

impl ColorJitter {
    /// Changes an image.
    ///
    /// # Errors
    /// Fails if a range is negative or not finite, or that of `hue` is above ½.
    #[track_caller]
    pub fn apply(&self, image: &Image, rng: &mut Philox) -> Result<Image> {
        let ranges = [self.brightness, self.contrast, self.saturation, self.hue];
        if let Some(range) = ranges.into_iter().find(|range| !(0.0..f32::INFINITY).contains(range)) {
            return Err(Error::range("ColorJitter", "range", range, "finite and at least 0")).at_caller();
        }
        if self.hue > 0.5 {
            return Err(Error::range("ColorJitter", "hue", self.hue, "at most 0.5, half the circle")).at_caller();
        }
        let drawn = ranges.map(|_| rng.uniform_f32());
        let factor = |op: usize| {
            let (least, most) = ((1.0 - ranges[op]).max(0.0), 1.0 + ranges[op]);
            least + (most - least) * drawn[op]
        };
        let change = |image: Image, op: usize| match op {
            0 => image.brightness(factor(op)),
            1 => image.contrast(factor(op)),
            2 => image.saturation(factor(op)),
            _ => image.hue(ranges[op] * (2.0 * drawn[op] - 1.0)),
        };
        let order = rng.permutation(ranges.len()).into_iter().filter(|&op| ranges[op] > 0.0);
        Ok(order.fold(image.clone(), change))
    }
}

/// Random changes of one strength, each drawn from fourteen: RandAugment (Cubuk et al. 2020), with torchvision's
/// changes and strengths.
///
/// ```
/// use data::{random::keyed, sources::image::{Image, RandAugment}};
/// # fn main() -> numcore::Result<()> {
/// let image = Image::new(4, 4, vec![9; 48])?;
/// let changed = RandAugment::default().apply(&image, &mut keyed(7, 0, 41))?;
/// assert_eq!(changed.size(), (4, 4));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandAugment {
    /// The number of changes of an image; 2 by default.
    pub changes: usize,
    /// The strength, from 0 to 30; 9 by default.
    pub magnitude: u32,
    /// The colour of pixels from outside the image; black by default.
    pub color: [u8; 3],
}

impl Default for RandAugment {
    fn default() -> Self {
        RandAugment { changes: 2, magnitude: 9, color: [0; 3] }
    }
}

impl RandAugment {
    /// Changes an image.
    ///
    /// # Errors
    /// Fails if the magnitude is above 30.
    #[track_caller]
    pub fn apply(&self, image: &Image, rng: &mut Philox) -> Result<Image> {
        if self.magnitude > 30 {
            return Err(Error::range("RandAugment", "magnitude", self.magnitude, "at most 30")).at_caller();
        }
        Ok((0..self.changes).fold(image.clone(), |image, _| {
            let (op, sign) = (rng.below(14), if rng.bernoulli(0.5) { -1.0 } else { 1.0 });
            self.change(image, op, sign)
        }))
    }

    fn change(&self, image: Image, op: u64, sign: f64) -> Image {
        let strength = f64::from(self.magnitude) / 30.0;
        let ((width, height), color) = (image.size(), self.color);
        let (width, height) = (f64::from(width), f64::from(height));
        let (shear, factor) = (sign * 0.3 * strength, (1.0 + sign * 0.9 * strength) as f32);
        let shift = |side: f64| -sign * (150.0 / 331.0 * side * strength).trunc();
        match op {
            0 => image,
            // Around the top left corner.
            1 => image.affine([1.0, shear, shear * height / 2.0, 0.0, 1.0, 0.0], color),
            2 => image.affine([1.0, 0.0, 0.0, shear, 1.0, shear * width / 2.0], color),
            3 => image.affine([1.0, 0.0, shift(width), 0.0, 1.0, 0.0], color),
            4 => image.affine([1.0, 0.0, 0.0, 0.0, 1.0, shift(height)], color),
            5 => image.rotated(sign * 30.0 * strength, color),
            6 => image.brightness(factor),
            7 => image.saturation(factor),
            8 => image.contrast(factor),
            9 => image.sharpness(factor),
            10 => image.posterize(8 - (strength * 4.0).round_ties_even() as u32),
            11 => image.solarize((255.0 * (1.0 - strength)) as f32),
            12 => image.auto_contrast(),
            _ => image.equalize(),
        }
    }
}
