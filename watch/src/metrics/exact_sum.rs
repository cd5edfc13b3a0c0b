//! [`ExactSum`]: sums of `f64` that never round.

/// The number of limbs of 32 bits that hold every `f64` in fixed point, and the carries of 2⁶³ additions.
const LIMBS: usize = 68;
const BITS: u32 = 32;
/// The number of additions after which carries are passed on: a limb of 64 bits has room for more.
const CARRY_AFTER: u32 = 1 << 30;

/// A sum of `f64` without rounding: any order of additions, and any division into parts, gives one value. Only that
/// value is rounded, once, to the nearest.
///
/// The sum is a number in fixed point, from the least subnormal up (Kulisch's accumulator); an addition touches three
/// of its limbs. NaN and infinities are counted separately; the value then follows IEEE addition.
///
/// ```
/// use watch::metrics::ExactSum;
/// let mut sum = ExactSum::default();
/// [1e300, 1.0, -1e300, 1e-300].into_iter().for_each(|x| sum.add(x));
/// assert_eq!(sum.value(), 1.0);
/// ```
#[derive(Clone, Debug)]
pub struct ExactSum {
    /// The limbs, least significant first, in units of 2⁻¹⁰⁷⁴. All but the last are less than 2³² once carries are
    /// passed on.
    limbs: [i64; LIMBS],
    /// The number of additions since carries were passed on.
    added: u32,
    /// The numbers of NaN, +∞ and −∞ that were added.
    special: [u64; 3],
}

impl Default for ExactSum {
    fn default() -> Self {
        ExactSum { limbs: [0; LIMBS], added: 0, special: [0; 3] }
    }
}

impl PartialEq for ExactSum {
    fn eq(&self, other: &Self) -> bool {
        self.limbs().eq(other.limbs())
    }
}

impl ExactSum {
    /// Adds a number.
    pub fn add(&mut self, x: f64) {
        if !x.is_finite() {
            self.special[if x.is_nan() {
                0
            } else if x > 0.0 {
                1
            } else {
                2
            }] += 1;
            return;
        }
        let exponent = (x.to_bits() >> 52 & 0x7ff) as u32;
        let fraction = x.to_bits() & ((1 << 52) - 1);
        let mantissa = if exponent == 0 { fraction } else { fraction | 1 << 52 };
        let position = exponent.saturating_sub(1);
        let (at, wide) = ((position / BITS) as usize, u128::from(mantissa) << (position % BITS));
        for (k, limb) in self.limbs[at..at + 3].iter_mut().enumerate() {
            let part = (wide >> (k as u32 * BITS)) as u32;
            *limb += if x.is_sign_negative() { -i64::from(part) } else { i64::from(part) };
        }
        self.added += 1;
        if self.added == CARRY_AFTER {
            self.carry();
        }
    }

    /// Adds another sum.
    pub fn absorb(&mut self, other: &ExactSum) {
        let mut other = other.clone();
        other.carry();
        self.carry();
        self.limbs.iter_mut().zip(other.limbs).for_each(|(sum, limb)| *sum += limb);
        self.special.iter_mut().zip(other.special).for_each(|(sum, n)| *sum += n);
        self.carry();
    }

    /// The nearest `f64`; of two equally near ones the even.
    pub fn value(&self) -> f64 {
        match self.special {
            [0, 0, 0] => self.finite(),
            [0, _, 0] => f64::INFINITY,
            [0, 0, _] => f64::NEG_INFINITY,
            _ => f64::NAN,
        }
    }

    /// The sum as numbers that [`of_limbs`](ExactSum::of_limbs) reads: equal sums give equal ones.
    pub(super) fn limbs(&self) -> impl Iterator<Item = u64> + use<> {
        let mut carried = self.clone();
        carried.carry();
        carried.limbs.into_iter().map(|limb| limb as u64).chain(carried.special)
    }

    pub(super) fn of_limbs(numbers: &[u64]) -> Option<Self> {
        let (limbs, special) = numbers.split_at_checked(LIMBS)?;
        let mut limbs: [i64; LIMBS] = std::array::from_fn(|i| limbs[i] as i64);
        // Limbs from another process are bounded, so that they cannot overflow.
        limbs[..LIMBS - 1].iter_mut().for_each(|limb| *limb &= i64::from(u32::MAX));
        limbs[LIMBS - 1] = limbs[LIMBS - 1].clamp(i64::MIN / 4, i64::MAX / 4);
        Some(ExactSum { limbs, added: 0, special: special.try_into().ok()? })
    }

    /// Passes carries on, so that all limbs but the last are less than 2³².
    fn carry(&mut self) {
        let mut carry = 0;
        for limb in &mut self.limbs[..LIMBS - 1] {
            let sum = *limb + carry;
            (*limb, carry) = (sum & i64::from(u32::MAX), sum >> BITS);
        }
        self.limbs[LIMBS - 1] += carry;
        self.added = 0;
    }

    fn finite(&self) -> f64 {
        let mut size = self.clone();
        size.carry();
        let negative = size.limbs[LIMBS - 1] < 0;
        if negative {
            size.limbs.iter_mut().for_each(|limb| *limb = -*limb);
            size.carry();
        }
        let value = size.rounded();
        if negative { -value } else { value }
    }

    /// The value of a sum that is not negative, whose carries are passed on.
    fn rounded(&self) -> f64 {
        let bit = |i: u32| self.limbs[(i / BITS) as usize] >> (i % BITS) & 1;
        let Some(top) = (0..LIMBS as u32 * BITS).rev().find(|&i| bit(i) == 1) else { return 0.0 };
        let bits_of = |from: u32, to: u32| (from..=to).rev().fold(0u64, |n, i| n << 1 | bit(i) as u64);
        // Below 2⁵³ units a number is its own representation, subnormal or not.
        if top <= 52 {
            return f64::from_bits(bits_of(0, top));
        }
        let (exponent, mantissa) = (u64::from(top - 51), bits_of(top - 52, top));
        if exponent >= 0x7ff {
            return f64::INFINITY;
        }
        let half = bit(top - 53) == 1;
        let more = (0..top - 53).any(|i| bit(i) == 1);
        let up = u64::from(half && (more || mantissa & 1 == 1));
        // A carry out of the fraction is a carry into the exponent, up to infinity.
        f64::from_bits((exponent << 52) + (mantissa & ((1 << 52) - 1)) + up)
    }
}

#[cfg(test)]
mod tests {
    use numcore::rng::Philox;

    use super::*;

    fn sum(values: &[f64]) -> f64 {
        let mut sum = ExactSum::default();
        values.iter().for_each(|&x| sum.add(x));
        sum.value()
    }

    #[test]
    fn one_number_is_itself() {
        for x in [0.0, 1.0, 0.1, 5e-324, f64::MIN_POSITIVE, 2.2e-308, f64::MAX, 1e-300, 3.5e17, 1.0 + f64::EPSILON] {
            assert_eq!(sum(&[x]).to_bits(), x.to_bits(), "{x}");
            assert_eq!(sum(&[-x]), -x);
        }
    }

    #[test]
    fn two_numbers_are_what_ieee_addition_makes_of_them() {
        let mut rng = Philox::new(1, 0);
        for _ in 0..2_000 {
            let (a, b) = (f64::from_bits(rng.next_u64()), f64::from_bits(rng.next_u64()));
            // Close exponents too, where rounding has to decide.
            let near = a * (1.0 + f64::from(rng.next_u64() as u32) / f64::from(u32::MAX));
            for (a, b) in [(a, b), (a, near), (a, -near)] {
                let (is, due) = (sum(&[a, b]), a + b);
                assert!(is == due || (is.is_nan() && due.is_nan()), "{a:e} + {b:e} = {is:e}, not {due:e}");
            }
        }
    }

    #[test]
    fn ties_go_to_the_even_number_and_a_bit_far_below_decides() {
        let ulp = f64::EPSILON;
        assert_eq!(sum(&[1.0, ulp / 2.0]), 1.0);
        assert_eq!(sum(&[1.0 + ulp, ulp / 2.0]), 1.0 + 2.0 * ulp);
        assert_eq!(sum(&[1.0, ulp / 2.0, 5e-324]), 1.0 + ulp);
        assert_eq!(sum(&[1.0, ulp / 2.0, -5e-324]), 1.0);
        assert_eq!(sum(&[f64::MAX, f64::MAX]), f64::INFINITY);
        assert_eq!(sum(&[f64::MAX, f64::MAX, -f64::MAX]), f64::MAX);
        assert_eq!(sum(&[-f64::MAX, -f64::MAX]), f64::NEG_INFINITY);
    }

    #[test]
    fn special_numbers_are_what_ieee_makes_of_them() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        assert_eq!((sum(&[1.0, inf]), sum(&[-inf, 1.0])), (inf, -inf));
        assert!(sum(&[inf, -inf]).is_nan() && sum(&[nan, inf]).is_nan());
    }

    #[test]
    fn order_and_parts_change_nothing() {
        let mut rng = Philox::new(2, 0);
        let scale = |bits: u64| f64::from_bits((bits % 2000) << 52);
        let values: Vec<f64> =
            (0..1000).map(|i| (rng.next_u64() as i64 as f64) * scale(rng.next_u64()) * (-1f64).powi(i)).collect();
        let whole = sum(&values);
        let backwards: Vec<f64> = values.iter().rev().copied().collect();
        assert_eq!(sum(&backwards).to_bits(), whole.to_bits());
        for parts in 2..8 {
            let mut all = ExactSum::default();
            for part in values.chunks(values.len() / parts) {
                let mut own = ExactSum::default();
                part.iter().for_each(|&x| own.add(x));
                all.absorb(&ExactSum::of_limbs(&own.limbs().collect::<Vec<_>>()).unwrap());
            }
            assert_eq!(all.value().to_bits(), whole.to_bits());
        }
    }

    #[test]
    fn carries_are_passed_on_in_time() {
        let mut sum = ExactSum { added: CARRY_AFTER - 1, ..ExactSum::default() };
        sum.add(-1.0);
        assert_eq!((sum.added, sum.value()), (0, -1.0));
        assert!(sum.limbs[..LIMBS - 1].iter().all(|limb| (0..=i64::from(u32::MAX)).contains(limb)));
    }
}
