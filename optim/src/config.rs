//! Hyper-parameters: plain structs with PyTorch's names and defaults, validated by ranges and saved as scalars.

use numcore::{Error, Result};
use smallvec::SmallVec;

/// The range that a hyper-parameter must be in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HyperBound {
    /// Any value but NaN.
    Any,
    /// A value of 0 or more.
    NonNegative,
    /// A value above 0.
    Positive,
    /// A value of 0 or less.
    NonPositive,
    /// A value of 1 or more.
    AtLeastOne,
    /// A value in `[0, 1)`.
    Unit,
    /// A value that the rule itself changes while it trains ([`UpdateRule::adapt`](crate::UpdateRule::adapt)), any but
    /// NaN. Checkpoints have it in any case.
    Adapted,
}

impl HyperBound {
    fn holds(self, x: f64) -> bool {
        match self {
            HyperBound::Any | HyperBound::Adapted => !x.is_nan(),
            HyperBound::NonNegative => x >= 0.0,
            HyperBound::Positive => x > 0.0,
            HyperBound::NonPositive => x <= 0.0,
            HyperBound::AtLeastOne => x >= 1.0,
            HyperBound::Unit => (0.0..1.0).contains(&x),
        }
    }

    fn words(self) -> &'static str {
        match self {
            HyperBound::Any | HyperBound::Adapted => "a number",
            HyperBound::NonNegative => "0 or more",
            HyperBound::Positive => "more than 0",
            HyperBound::NonPositive => "0 or less",
            HyperBound::AtLeastOne => "1 or more",
            HyperBound::Unit => "in [0, 1)",
        }
    }
}

/// The scalars that a hyper-parameter is saved as.
pub type HyperNumbers = SmallVec<[f64; 3]>;

/// The type of a hyper-parameter, which can be converted to and from scalars.
pub trait HyperValue {
    /// The scalars that this value is saved as.
    fn numbers(&self) -> HyperNumbers;
    /// Sets the value from these scalars. Returns false if they are not a valid value.
    fn assign(&mut self, numbers: &[f64]) -> bool;
}

impl HyperValue for f64 {
    fn numbers(&self) -> HyperNumbers {
        HyperNumbers::from_slice(&[*self])
    }
    fn assign(&mut self, numbers: &[f64]) -> bool {
        let [x] = numbers else { return false };
        *self = *x;
        true
    }
}

impl<const N: usize> HyperValue for [f64; N] {
    fn numbers(&self) -> HyperNumbers {
        HyperNumbers::from_slice(self)
    }
    fn assign(&mut self, numbers: &[f64]) -> bool {
        numbers.try_into().map(|n| *self = n).is_ok()
    }
}

impl HyperValue for bool {
    fn numbers(&self) -> HyperNumbers {
        HyperNumbers::from_slice(&[f64::from(u8::from(*self))])
    }
    fn assign(&mut self, numbers: &[f64]) -> bool {
        let ([0.0] | [1.0]) = numbers else { return false };
        *self = numbers[0] == 1.0;
        true
    }
}

impl HyperValue for u32 {
    fn numbers(&self) -> HyperNumbers {
        HyperNumbers::from_slice(&[f64::from(*self)])
    }
    fn assign(&mut self, numbers: &[f64]) -> bool {
        let [x] = numbers else { return false };
        let whole = *x as u32;
        *self = whole;
        f64::from(whole) == *x
    }
}

/// An optional hyper-parameter, saved as one scalar, or as none for `None`.
impl HyperValue for Option<f64> {
    fn numbers(&self) -> HyperNumbers {
        self.iter().copied().collect()
    }
    fn assign(&mut self, numbers: &[f64]) -> bool {
        *self = numbers.first().copied();
        numbers.len() <= 1
    }
}

/// One hyper-parameter of a [`Config`].
pub struct HyperParam<'a> {
    /// The name of the hyper-parameter, as in PyTorch.
    pub name: &'static str,
    /// The value of the hyper-parameter.
    pub value: &'a mut dyn HyperValue,
    /// The range that the value must be in.
    pub bound: HyperBound,
}

/// The hyper-parameters of an optimizer, usually declared with [`config!`](crate::config).
pub trait Config: Clone + Default + Send + Sync + 'static {
    /// The name of the optimizer in messages.
    const NAME: &'static str;
    /// The base learning rate, from which a [`LrSchedule`](crate::LrSchedule) starts.
    fn lr(&self) -> f64;
    /// Sets the base learning rate.
    fn set_lr(&mut self, lr: f64);
    /// All hyper-parameters, in declaration order.
    fn settings(&mut self) -> Vec<HyperParam<'_>>;

    /// Sets a hyper-parameter by name, for example from a command line or a file.
    ///
    /// # Errors
    /// An error if the name is unknown, or the scalars are not a valid value.
    fn set(&mut self, name: &str, numbers: &[f64]) -> Result<()> {
        let mut settings = self.settings();
        let Some(found) = settings.iter_mut().find(|s| s.name == name) else {
            let names: Vec<&str> = settings.iter().map(|s| s.name).collect();
            return Err(Error::config(
                Self::NAME,
                "hyper_parameters",
                format!("has no `{name}`; it has {}", names.join(", ")),
            ));
        };
        if found.value.assign(numbers) {
            return Ok(());
        }
        Err(Error::config(Self::NAME, found.name, format!("`{name}` cannot be {numbers:?}")))
    }

    /// Checks that all hyper-parameters are in range; the error names the first that is not.
    fn check(&self) -> Result<()> {
        let mut copy = self.clone();
        for HyperParam { name, value, bound } in copy.settings() {
            let numbers = value.numbers();
            if !numbers.iter().all(|&x| bound.holds(x)) {
                let why = format!("`{name}` must be {}, it is {:?}", bound.words(), numbers.as_slice());
                return Err(Error::config(Self::NAME, name, why));
            }
        }
        Ok(())
    }
}

/// Declares the hyper-parameters of an optimizer: a struct, its defaults, and the range of each. One must be called
/// `lr`.
///
/// ```
/// use optim::Config;
/// optim::config! {
///     /// Plain gradient descent.
///     DescentConfig = "Descent" {
///         /// Step size.
///         lr: f64 = 1e-3, NonNegative;
///     }
/// }
/// assert!(DescentConfig { lr: -1.0 }.check().is_err());
/// ```
#[macro_export]
macro_rules! config {
    ($(#[$doc:meta])* $name:ident = $title:literal {
        $($(#[$field_doc:meta])* $field:ident: $ty:ty = $default:expr, $bound:ident;)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $name { $($(#[$field_doc])* pub $field: $ty,)* }

        impl Default for $name {
            fn default() -> Self { $name { $($field: $default,)* } }
        }

        impl $crate::Config for $name {
            const NAME: &'static str = $title;
            fn lr(&self) -> f64 { self.lr }
            fn set_lr(&mut self, lr: f64) { self.lr = lr; }
            fn settings(&mut self) -> Vec<$crate::HyperParam<'_>> {
                vec![$($crate::HyperParam {
                    name: stringify!($field), value: &mut self.$field, bound: $crate::HyperBound::$bound,
                },)*]
            }
        }
    };
}
