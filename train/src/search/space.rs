//! [`SearchSpace`]: the fields of a configuration that a search varies, and the values that they may have.

use numcore::{Error, Result, Within, rng::Philox};
use toml::{Table, Value};

/// A configuration in TOML, and values of some of its fields to try.
///
/// The table `[search]` names the fields, as the configuration itself does or by a path with dots. A field has a list
/// of values, or a range of numbers for random searches. Both ends belong to the range, of integers where the
/// configuration has an integer. A draw from a range with `log = true` is uniform in the logarithm.
///
/// ```
/// use train::search::SearchSpace;
/// # fn main() -> numcore::Result<()> {
/// let text = "
///     steps = 100
///     [optimizer]
///     lr = 1e-3
///     decay = 0.1
///     [search]
///     optimizer.lr = { min = 1e-4, max = 1e-1, log = true }
///     optimizer.decay = [0.0, 0.1]
/// ";
/// let space = SearchSpace::from_toml(text)?.budget_field("steps")?;
/// assert_eq!(space.fields().collect::<Vec<_>>(), ["optimizer.decay", "optimizer.lr"]);
/// let error = SearchSpace::from_toml("[optimizer]\nlr = 1e-3\n[search]\noptimizer.rate = [1.0]").unwrap_err();
/// assert!(error.to_string().contains("`optimizer.rate`"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[doc(alias("suggest_float", "suggest_categorical", "loguniform", "param_space", "parameters"))]
pub struct SearchSpace {
    /// The configuration without `[search]`.
    base: Table,
    /// The fields to vary, by name.
    fields: Vec<(String, Candidates)>,
    /// The fields of the budget and of the folder, if they were named.
    budget: Option<String>,
    folder: Option<String>,
    /// All that was read and named, as text: equal for equal spaces.
    definition: String,
}

/// The values that a field may have.
#[derive(Clone, Debug)]
enum Candidates {
    List(Vec<Value>),
    Integers { min: i64, max: i64, log: bool },
    Floats { min: f64, max: f64, log: bool },
}

impl SearchSpace {
    /// Reads a configuration with its table `[search]`.
    ///
    /// # Errors
    /// Fails for text that is no TOML, and without a field to vary. Names a field that the configuration lacks, one
    /// whose values are of another type, and one with an empty list or range.
    #[track_caller]
    pub fn from_toml(text: &str) -> Result<Self> {
        Self::read(text).at_caller()
    }

    fn read(text: &str) -> Result<Self> {
        let table: Result<Table> =
            text.parse().map_err(|e: toml::de::Error| Error::format("SearchSpace", e.to_string()));
        let mut base = table?;
        let definition = base.to_string();
        let mut fields = Vec::new();
        if let Some(search) = base.remove("search") {
            let Value::Table(search) = search else {
                return Err(wrong("search", "is a table: write [search] above the fields"));
            };
            add_fields(search, &base, "", &mut fields)?;
        }
        fields.sort_by(|a: &(String, _), b| a.0.cmp(&b.0));
        if fields.is_empty() {
            return Err(wrong("search", "names no field to vary: write `field = [value, value]` below [search]"));
        }
        if let Some(twice) = fields.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(wrong(&twice[0].0, "is there twice"));
        }
        Ok(SearchSpace { base, fields, budget: None, folder: None, definition })
    }

    /// Names the field of the configuration that gets a trial's budget: the number of steps.
    ///
    /// # Errors
    /// Fails if the configuration has no such field, or it is no integer, or is searched.
    #[track_caller]
    pub fn budget_field(mut self, name: &str) -> Result<Self> {
        self.set_aside(name, &Value::Integer(0)).at_caller()?;
        self.budget = Some(name.into());
        Ok(self)
    }

    /// Names the field of the configuration that gets a trial's folder.
    ///
    /// # Errors
    /// Fails if the configuration has no such field, or it is no string, or is searched.
    #[track_caller]
    pub fn folder_field(mut self, name: &str) -> Result<Self> {
        self.set_aside(name, &Value::String(String::new())).at_caller()?;
        self.folder = Some(name.into());
        Ok(self)
    }

    fn set_aside(&mut self, name: &str, like: &Value) -> Result<()> {
        let known = field(&self.base, name)?;
        if !known.same_type(like) {
            return Err(wrong(name, format!("has the type {}, not {}", known.type_str(), like.type_str())));
        }
        if self.fields.iter().any(|(varied, _)| varied == name) {
            return Err(wrong(name, "is set by the search, and cannot be varied"));
        }
        self.definition += &format!("# {name}: {}\n", like.type_str());
        Ok(())
    }

    /// The names of the fields to vary, in order.
    pub fn fields(&self) -> impl Iterator<Item = &str> {
        self.fields.iter().map(|(name, _)| name.as_str())
    }

    /// The budget of the configuration itself: its budget field, or 1 without such a field.
    pub(super) fn budget(&self) -> u64 {
        let known = self.budget.as_ref().and_then(|name| field(&self.base, name).ok()?.as_integer());
        known.map_or(1, |steps| u64::try_from(steps).unwrap_or(0))
    }

    /// A text that is equal for equal spaces.
    pub(super) fn definition(&self) -> &str {
        &self.definition
    }

    /// The number of combinations of all values.
    pub(super) fn combinations(&self) -> Result<u32> {
        let mut all = 1u32;
        for (name, candidates) in &self.fields {
            let Candidates::List(list) = candidates else {
                return Err(wrong(
                    name,
                    "is a range, which a grid cannot go through: give a list, or search at random",
                ));
            };
            let product = u32::try_from(list.len()).ok().and_then(|length| all.checked_mul(length));
            all = product.ok_or_else(|| wrong(name, "makes the grid larger than 2³² trials"))?;
        }
        Ok(all)
    }

    /// The values of the combination `number` of the grid. The last field varies fastest.
    pub(super) fn of_grid(&self, number: u32) -> Vec<Value> {
        // A grid has no ranges: all of these are replaced.
        let (mut values, mut rest) = (self.drawn(0, number), number as usize);
        for (value, (_, candidates)) in values.iter_mut().zip(&self.fields).rev() {
            if let Candidates::List(list) = candidates {
                *value = list[rest % list.len()].clone();
                rest /= list.len();
            }
        }
        values
    }

    /// The values of random trial `number`, which depend on the seed and the number alone.
    pub(super) fn drawn(&self, seed: u64, number: u32) -> Vec<Value> {
        let mut rng = Philox::new(seed, number);
        self.fields.iter().map(|(_, candidates)| candidates.draw(&mut rng)).collect()
    }

    /// The configuration of a trial with the values of the fields, in order.
    pub(super) fn config(&self, values: &[Value], budget: u64, folder: &str) -> Result<Table> {
        let mut config = self.base.clone();
        for ((name, _), value) in self.fields.iter().zip(values) {
            set(&mut config, name, value.clone())?;
        }
        if let Some(name) = &self.budget {
            let budget =
                i64::try_from(budget).map_err(|_| Error::range("Search", "budget", budget as f64, "below 2⁶³"))?;
            set(&mut config, name, Value::Integer(budget))?;
        }
        if let Some(name) = &self.folder {
            set(&mut config, name, Value::String(folder.into()))?;
        }
        Ok(config)
    }
}

impl Candidates {
    /// Reads the values of a field that has the value `known` in the configuration.
    fn read(name: &str, given: Value, known: &Value) -> Result<Self> {
        match given {
            Value::Array(list) if list.is_empty() => Err(wrong(name, "has no values")),
            Value::Array(list) => {
                let list: Result<Vec<Value>> = list.into_iter().map(|value| as_type_of(known, name, value)).collect();
                Ok(Candidates::List(list?))
            }
            Value::Table(range) => Self::range(name, range, known),
            other => Err(wrong(name, format!("has the value {other}: give a list, or {{ min = .., max = .. }}"))),
        }
    }

    fn range(name: &str, mut range: Table, known: &Value) -> Result<Self> {
        let mut end = |key: &str| {
            let value = range.remove(key).ok_or_else(|| wrong(name, format!("is a range without `{key}`")))?;
            as_type_of(known, name, value)
        };
        let (min, max) = (end("min")?, end("max")?);
        let log = match range.remove("log") {
            None => false,
            Some(Value::Boolean(log)) => log,
            Some(other) => return Err(wrong(name, format!("has `log = {other}`: it is true or false"))),
        };
        if let Some((key, _)) = range.iter().next() {
            return Err(wrong(name, format!("has `{key}`, but a range has `min`, `max` and `log` alone")));
        }
        let (candidates, is_range, positive) = match (min, max) {
            (Value::Integer(min), Value::Integer(max)) => (Candidates::Integers { min, max, log }, min <= max, min > 0),
            (Value::Float(min), Value::Float(max)) => {
                (Candidates::Floats { min, max, log }, min <= max && (max - min).is_finite(), min > 0.0)
            }
            _ => return Err(wrong(name, format!("has the type {}, without ranges", known.type_str()))),
        };
        match () {
            () if !is_range => Err(wrong(name, "has an empty or infinite range: `min` is above `max`, or not finite")),
            () if log && !positive => Err(wrong(name, "has a range with `log`, whose `min` must be above 0")),
            () => Ok(candidates),
        }
    }

    fn draw(&self, rng: &mut Philox) -> Value {
        match *self {
            Candidates::List(ref list) => list[rng.below(list.len() as u64) as usize].clone(),
            Candidates::Integers { min, max, log: false } => {
                let span = (max.wrapping_sub(min) as u64).saturating_add(1);
                Value::Integer(min.wrapping_add(rng.below(span) as i64))
            }
            Candidates::Integers { min, max, log: true } => {
                let drawn = between(libm::log(min as f64), libm::log(max as f64 + 1.0), rng);
                Value::Integer((libm::exp(drawn) as i64).clamp(min, max))
            }
            Candidates::Floats { min, max, log: false } => Value::Float(between(min, max, rng).clamp(min, max)),
            Candidates::Floats { min, max, log: true } => {
                Value::Float(libm::exp(between(libm::log(min), libm::log(max), rng)).clamp(min, max))
            }
        }
    }
}

fn between(min: f64, max: f64, rng: &mut Philox) -> f64 {
    min + rng.uniform() * (max - min)
}

/// Adds the fields that a table of `[search]` names. A name may have dots, as a quoted key.
fn add_fields(given: Table, base: &Table, within: &str, into: &mut Vec<(String, Candidates)>) -> Result<()> {
    for (key, value) in given {
        let name = format!("{within}{key}");
        match (field(base, &name)?, value) {
            (Value::Table(_), Value::Table(inner)) => add_fields(inner, base, &format!("{name}."), into)?,
            (Value::Table(_), _) => return Err(wrong(&name, "is a table: name a field of it")),
            (known, value) => into.push((name.clone(), Candidates::read(&name, value, known)?)),
        }
    }
    Ok(())
}

/// The value, where a whole number may stand for a fraction.
fn as_type_of(known: &Value, name: &str, value: Value) -> Result<Value> {
    match (known, value) {
        (Value::Float(_), Value::Integer(whole)) => Ok(Value::Float(whole as f64)),
        (known, value) if known.same_type(&value) => Ok(value),
        (known, value) => {
            Err(wrong(name, format!("has the type {} in the configuration, and not {value}", known.type_str())))
        }
    }
}

/// The field of a name with dots.
pub(super) fn field<'t>(table: &'t Table, name: &str) -> Result<&'t Value> {
    let mut steps = name.split('.');
    let first = steps.next().and_then(|key| table.get(key));
    let found = steps.fold(first, |value, key| value?.as_table()?.get(key));
    found.ok_or_else(|| missing(name))
}

fn set(table: &mut Table, name: &str, value: Value) -> Result<()> {
    let mut steps = name.split('.');
    let first = steps.next().and_then(|key| table.get_mut(key));
    let found = steps.fold(first, |value, key| value?.as_table_mut()?.get_mut(key));
    *found.ok_or_else(|| missing(name))? = value;
    Ok(())
}

fn missing(name: &str) -> Error {
    wrong(name, "is no field of the configuration: add it there, or correct the name")
}

fn wrong(name: &str, why: impl Into<String>) -> Error {
    Error::format(format!("SearchSpace: `{name}`"), why)
}
