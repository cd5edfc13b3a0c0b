//! Changes of an image's colours, with torchvision's values.

use super::Image;

/// A pixel: red, green, blue.
type Rgb = [u8; 3];

impl Image {
    /// The image with every value multiplied by `factor`: 0 is black, 1 the image itself.
    #[doc(alias("adjust_brightness"))]
    pub fn brightness(&self, factor: f32) -> Image {
        self.each(|_, pixel| pixel.map(|x| blend(x, 0.0, factor)))
    }

    /// The image with its differences from the mean grey multiplied by `factor`: 0 is grey, 1 the image itself.
    #[doc(alias("adjust_contrast"))]
    pub fn contrast(&self, factor: f32) -> Image {
        let greys = self.rows().map(|pixel| f64::from(grey(pixel)));
        let (width, height) = self.size();
        let mean = (greys.sum::<f64>() / (f64::from(width) * f64::from(height)).max(1.0)) as f32;
        self.each(|_, pixel| pixel.map(|x| blend(x, mean, factor)))
    }

    /// The image with the differences of its colours from grey multiplied by `factor`: 0 is grey, 1 the image itself.
    #[doc(alias("adjust_saturation"))]
    pub fn saturation(&self, factor: f32) -> Image {
        self.each(|_, pixel| pixel.map(|x| blend(x, grey(pixel), factor)))
    }

    /// The image with its hues turned by `turn` of the circle of colours: ½ gives the complements.
    #[doc(alias("adjust_hue"))]
    pub fn hue(&self, turn: f32) -> Image {
        self.each(|_, pixel| {
            let [r, g, b] = pixel.map(|x| f32::from(x) / 255.0);
            let (most, least) = (r.max(g).max(b), r.min(g).min(b));
            let range = most - least;
            if range == 0.0 {
                return pixel;
            }
            let [from_r, from_g, from_b] = [r, g, b].map(|x| (most - x) / range);
            let sixths = if most == r {
                from_b - from_g
            } else if most == g {
                2.0 + from_r - from_b
            } else {
                4.0 + from_g - from_r
            };
            let hue = ((sixths / 6.0 + 1.0) % 1.0 + turn).rem_euclid(1.0) * 6.0;
            let (saturation, part) = (range / most, hue - hue.floor());
            let p = most * (1.0 - saturation);
            let q = most * (1.0 - saturation * part);
            let t = most * (1.0 - saturation * (1.0 - part));
            let turned = match hue as u32 % 6 {
                0 => [most, t, p],
                1 => [q, most, p],
                2 => [p, most, t],
                3 => [p, q, most],
                4 => [t, p, most],
                _ => [most, p, q],
            };
            turned.map(|x| (x.clamp(0.0, 1.0) * 255.999) as u8)
        })
    }

    /// The image with its differences from a blurred one multiplied by `factor`: 0 is blurred, 1 the image itself. The
    /// pixels at the border stay.
    #[doc(alias("adjust_sharpness"))]
    pub fn sharpness(&self, factor: f32) -> Image {
        let (width, height) = self.size();
        let inner = |at: u32, all: u32| at > 0 && at + 1 < all;
        self.each(|at, pixel| {
            let (x, y) = (at % width, at / width);
            if !inner(x, width) || !inner(y, height) {
                return pixel;
            }
            let around = (0..9).map(|k| self.pixels.get_pixel(x + k % 3 - 1, y + k / 3 - 1).0);
            let sums = around.fold([0u32; 3], |sum, other| std::array::from_fn(|c| sum[c] + u32::from(other[c])));
            std::array::from_fn(|c| {
                let blurred = (sums[c] + 4 * u32::from(pixel[c])) as f32 / 13.0;
                blend(pixel[c], blurred.round_ties_even(), factor)
            })
        })
    }

    /// The image with the first `bits` bits of each value alone.
    pub fn posterize(&self, bits: u32) -> Image {
        let mask = !(255u32 >> bits.min(8)) as u8;
        self.each(|_, pixel| pixel.map(|x| x & mask))
    }

    /// The image with the values from `threshold` on inverted.
    pub fn solarize(&self, threshold: f32) -> Image {
        self.each(|_, pixel| pixel.map(|x| if f32::from(x) >= threshold { 255 - x } else { x }))
    }

    /// The image with each channel stretched to the range 0 to 255.
    #[doc(alias("autocontrast"))]
    pub fn auto_contrast(&self) -> Image {
        let ends = |(low, high): (Rgb, Rgb), x: Rgb| {
            (std::array::from_fn(|c| low[c].min(x[c])), std::array::from_fn(|c| high[c].max(x[c])))
        };
        let (low, high) = self.rows().fold(([255; 3], [0; 3]), ends);
        self.each(|_, pixel| {
            std::array::from_fn(|c| match high[c].saturating_sub(low[c]) {
                0 => pixel[c],
                // The reciprocal first, as PyTorch divides a number by a tensor.
                range => (f32::from(pixel[c] - low[c]) * (f32::from(range).recip() * 255.0)) as u8,
            })
        })
    }

    /// The image with the values of each channel spread so that all are about equally frequent.
    pub fn equalize(&self) -> Image {
        let mut counts = [[0u32; 256]; 3];
        self.rows().for_each(|pixel| (0..3).for_each(|c| counts[c][usize::from(pixel[c])] += 1));
        let tables = counts.map(|counts| {
            let last = counts.iter().rposition(|&count| count > 0).unwrap_or(0);
            let step = counts[..last].iter().sum::<u32>() / 255;
            let mut before = 0;
            let table: [u8; 256] = std::array::from_fn(|x| {
                let spread = (before + step / 2).checked_div(step).unwrap_or(x as u32);
                before += counts[x];
                // The first value stays 0 whatever half a step rounds to.
                if step > 0 && x == 0 { 0 } else { spread.min(255) as u8 }
            });
            table
        });
        self.each(|_, pixel| std::array::from_fn(|c| tables[c][usize::from(pixel[c])]))
    }

    fn rows(&self) -> impl Iterator<Item = Rgb> {
        self.pixels.pixels().map(|pixel| pixel.0)
    }

    /// The image of a function of the number and the value of each pixel.
    fn each(&self, mut f: impl FnMut(u32, Rgb) -> Rgb) -> Image {
        let mut pixels = self.pixels.clone();
        pixels.pixels_mut().zip(0..).for_each(|(pixel, at)| pixel.0 = f(at, pixel.0));
        Image { pixels }
    }
}

/// The luma of ITU-R BT.601, a whole number.
fn grey([r, g, b]: Rgb) -> f32 {
    (0.2989 * f32::from(r) + 0.587 * f32::from(g) + 0.114 * f32::from(b)).floor()
}

fn blend(x: u8, other: f32, factor: f32) -> u8 {
    (factor * f32::from(x) + (1.0 - factor) * other) as u8
}
