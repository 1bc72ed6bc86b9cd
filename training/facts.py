"""Skills that answer with facts: rows of tables, words, lists and numbers."""

from content import items, mapping
from exchanges import CAPITALS, NAMES, OPPOSITES, PHRASES, sum_held_out
from skills import CATEGORIES, NUMBER_WORDS, TABLES, Skills
from turns import Turn, article, capitalize, listing, plural, sentence

SINGULAR = mapping(TABLES["singular"])
COUNTABLE = items(TABLES["countable"], " ")
TABLE_SKILLS = {
    name: mapping(TABLES[name])
    for name in (
        "continents",
        "sounds",
        "babies",
        "homes",
        "eats",
        "legs",
        "colors",
        "plurals",
        "past tense",
        "synonyms",
        "animals",
    )
}
TAKES_NO_ARTICLE = ("colors", "drinks", "sports", "metals")
CATEGORY_QUESTIONS = mapping(TABLES["category questions"])
COMPARABLE = items(TABLES["comparable categories"])


class FactSkills(Skills):
    """Skills whose replies are facts. Each public method returns the turns of one exchange or a few."""

    def table_row(self) -> list[Turn]:
        """Ask for a row of a table, such as the sound of an animal."""
        name = self.choice(list(TABLE_SKILLS))
        x, y = self.choice(list(TABLE_SKILLS[name].items()))
        y = y.replace(" | ", " ")
        if name == "legs":
            y = NUMBER_WORDS[int(y)] if int(y) else "no"
        return self._templated(self.choice(PHRASES[name]), x=x, y=y, a_x=article(x), a_y=article(y), xs=plural(x))

    def difference(self) -> list[Turn]:
        """Describe two animals, or one animal and an unknown word."""
        known = TABLE_SKILLS["animals"]
        x, y = self.rng.sample(list(known), 2)
        first, second = (known[name].split(" | ")[0] for name in (x, y))
        question = self._phrase("differences between").format(article(x), article(y))
        if self.chance(0.3):
            strange = self.invented_name().lower()
            question = self._phrase("differences between").format(article(x), article(strange))
            return [Turn(question, f"{first} But I don't know what {article(strange)} is.")]
        return [Turn(question, f"{first} {second}")]

    def favorite(self) -> list[Turn]:
        """Ask for a favorite thing of the model."""
        x, y = self.choice(list(mapping(TABLES["favorites"]).items()))
        return self._templated(self.choice(PHRASES["favorites"]), x=x, y=y)

    def capital(self) -> list[Turn]:
        """Ask for the capitals of one to three countries."""
        countries = self.rng.sample(list(CAPITALS), 3)
        if self.chance(0.1):
            country = countries[0]
            return self._templated(self.choice(PHRASES["which country"]), x=CAPITALS[country], y=country)
        if self.chance(0.03):
            place = self.invented_name() + self.choice(["ia", "land", "stan", "ville"])
            question = self.choice(PHRASES["capital questions"]).format(country=place)
            return [Turn(question, f"I don't know a country called {place}.")]
        follow_ups = ["And {x}?", "What about {x}?", "and {x}", "How about {x}?"]
        questions = [self.choice(PHRASES["capital questions"]).format(country=countries[0])]
        questions += [self.choice(follow_ups).format(x=country) for country in countries[1:]]
        return [
            Turn(question, sentence(f"the capital of {country} is {CAPITALS[country]}"), CAPITALS[country])
            for question, country in zip(questions, countries)
        ][: self.choice([1, 1, 1, 1, 2, 3])]

    def opposite(self) -> list[Turn]:
        """Ask for the opposites of one to three words."""
        words = self.rng.sample(list(OPPOSITES), 3)
        follow_ups = ["And {x}?", "What about {x}?", "and of {x}?"]
        questions = [self.choice(PHRASES["opposite questions"]).format(word=words[0])]
        questions += [self.choice(follow_ups).format(x=word) for word in words[1:]]
        return [
            Turn(question, f"The opposite of {word} is {OPPOSITES[word]}.", capitalize(OPPOSITES[word]))
            for question, word in zip(questions, words)
        ][: self.choice([1, 1, 1, 1, 2, 3])]

    def rhyme(self) -> list[Turn]:
        """Ask for words that rhyme."""
        words = self.choice(TABLES["rhymes"]).split()
        self.rng.shuffle(words)
        rhymes = words[1 : 1 + self.rng.randint(1, 3)]
        verb = "rhymes" if len(rhymes) == 1 else "rhyme"
        return self._templated(
            self.choice(PHRASES["rhymes"]), x=words[0], y=listing(rhymes), verb=verb, first=rhymes[0]
        )

    def comparison(self) -> list[Turn]:
        """Ask which of two things is bigger, smaller, faster or slower."""
        table, more, less = self.choice([("sizes", "bigger", "smaller"), ("speeds", "faster", "slower")])
        low, high = sorted(self.rng.sample(range(len(TABLES[table])), 2))
        smaller, bigger = TABLES[table][low], TABLES[table][high]
        x, y = self.rng.sample([smaller, bigger], 2)
        if self.chance(0.6):
            return self._templated(
                "Which is {more}, {x} or {y}? => {big} is {more} than {small} => {big}",
                more=more,
                x=x,
                y=y,
                big=bigger,
                small=smaller,
            )
        return self._templated(
            "Which is {less}, {x} or {y}? => {small} is {less} than {big} => {small}",
            less=less,
            x=x,
            y=y,
            big=bigger,
            small=smaller,
        )

    def calendar(self) -> list[Turn]:
        """Ask for the day or month before or after another one."""
        period, names = self.choice([("day", CATEGORIES["days of the week"]), ("month", CATEGORIES["months"])])
        place = self.rng.randrange(len(names))
        word, step = self.choice([("after", 1), ("before", -1)])
        return self._templated(
            self.choice(PHRASES["calendar"]),
            period=period,
            word=word,
            x=names[place],
            y=names[(place + step) % len(names)],
        )

    def membership(self) -> list[Turn]:
        """Ask whether a thing belongs to a category."""
        own, other = self.rng.sample(COMPARABLE, 2)
        member = self.choice(CATEGORIES[own])
        asked, verdict = (own, "Yes") if member in CATEGORIES[other] or self.chance(0.5) else (other, "No")
        if member[0].isupper() or own in TAKES_NO_ARTICLE:
            return self._templated(
                "Is {x} {asked}? => {verdict}, {x} is {own} => {verdict}",
                x=member,
                verdict=verdict,
                asked=article(SINGULAR[asked]),
                own=article(SINGULAR[own]),
            )
        return self._templated(
            "Are {x} {asked}? => {verdict}, {x} are {own} => {verdict}", x=member, verdict=verdict, asked=asked, own=own
        )

    def spelling(self) -> list[Turn]:
        """Ask for the letters of a word."""
        word = self.choice(items(TABLES["spelling"], " "))
        return self._templated(
            self.choice(PHRASES["spelling"]),
            word=word,
            letters="-".join(word.upper()),
            first=word[0].upper(),
            last=word[-1].upper(),
            count=NUMBER_WORDS[len(word)],
        )

    def lists(self) -> list[Turn]:
        """Ask for two to five members of a category."""
        category, members = self.choice(list(CATEGORIES.items()))
        count = self.rng.randint(2, min(5, len(members)))
        chosen = self.rng.sample(members, count)
        if category in SINGULAR and self.chance(0.2):
            question = self.choice(PHRASES["one of a kind"]).format(article(SINGULAR[category]))
            return [Turn(question, sentence(chosen[0]), capitalize(chosen[0]))]
        number = NUMBER_WORDS[count]
        replies = [sentence(listing(chosen)), f"Here are {number} {category}: {listing(chosen)}."]
        asked = CATEGORY_QUESTIONS.get(category, category) if self.chance(0.4) else category
        question = self.choice(PHRASES["list"]).format(f"{self.choice([number, count])} {asked}")
        turns = [Turn(question, self.choice(replies))]
        rest = [member for member in members if member not in chosen]
        if rest and self.chance(0.25):
            turns.append(Turn(self.choice(PHRASES["one more"]), sentence(self.choice(rest))))
        return turns

    def sum_pair(self) -> tuple[int, int]:
        """Sample two numbers below 100 whose sum is not held out."""
        while True:
            high = self.choice([9, 9, 20, 50, 99, 99, 99])
            pair = [self.rng.randint(0, high), self.rng.randint(0, self.choice([high, high, 9]))]
            if not sum_held_out(*pair):
                self.rng.shuffle(pair)
                return pair[0], pair[1]

    def sums(self) -> list[Turn]:
        """Ask for a sum, sometimes with a second sum."""
        a, b = self.sum_pair()
        total = a + b
        if total <= 20 and self.chance(0.15):
            return self._templated(
                self.choice(PHRASES["sums in words"]), x=NUMBER_WORDS[a], y=NUMBER_WORDS[b], z=NUMBER_WORDS[total]
            )
        reply = self.choice([f"{a} + {b} = {total}.", f"{a} + {b} = {total}.", f"{a} plus {b} is {total}."])
        question = self.choice([q for q in PHRASES["sum questions"] if not sum_held_out(a, b, q)])
        turns = [Turn(question.format(a=a, b=b), reply, str(total))]
        extra = self.rng.randint(1, 9)
        if self.chance(0.15) and not sum_held_out(total, extra):
            question = self.choice(["Plus {x}?", "And plus {x}?", "Now add {x}.", "and {x} more?"]).format(x=extra)
            turns.append(Turn(question, f"{total} + {extra} = {total + extra}.", str(total + extra)))
        elif self.chance(0.15):
            a, b = self.sum_pair()
            question = self.choice(["And {a} + {b}?", "What about {a} + {b}?", "and {a}+{b}?"]).format(a=a, b=b)
            turns.append(Turn(question, f"{a} + {b} = {a + b}.", str(a + b)))
        return turns

    def arithmetic(self) -> list[Turn]:
        """Ask for a difference, product, quotient, comparison or count."""
        kind = self.rng.choices(
            ["difference", "product", "quotient", "too big", "one", "two", "count"], [32, 26, 8, 6, 10, 10, 8]
        )[0]
        if kind == "difference":
            high = self.choice([10, 20, 50, 99])
            b, a = sorted((self.rng.randint(0, high), self.rng.randint(0, high)))
            reply = self.choice([f"{a} - {b} = {a - b}.", f"{a} minus {b} is {a - b}."])
            return [Turn(self.choice(PHRASES["differences"]).format(a=a, b=b), reply, str(a - b))]
        if kind == "product":
            a, b = self.rng.randint(0, 12), self.rng.randint(0, 12)
            reply = self.choice([f"{a} x {b} = {a * b}.", f"{a} times {b} is {a * b}."])
            return [Turn(self.choice(PHRASES["products"]).format(a=a, b=b), reply, str(a * b))]
        if kind == "quotient":
            b, quotient = self.rng.randint(1, 10), self.rng.randint(1, 10)
            a = b * quotient
            question = self.choice(PHRASES["quotients"]).format(a=a, b=b)
            return [Turn(question, f"{a} divided by {b} is {quotient}.", str(quotient))]
        if kind == "too big":
            a, b = self.rng.randint(100, self.choice([999, 99999])), self.rng.randint(2, self.choice([99, 999, 99999]))
            if self.chance(0.5):
                a, b = b, a
            return [Turn(self.choice(PHRASES["too big"]).format(a=a, b=b), self.choice(PHRASES["too big replies"]))]
        if kind == "one":
            a = self.rng.randint(1, 50)
            return self._templated(
                self.choice(PHRASES["one number"]),
                a=a,
                double=2 * a,
                next=a + 1,
                previous=a - 1,
                parity="odd" if a % 2 else "even",
            )
        if kind == "two":
            a, b = self.rng.sample(range(100), 2)
            return self._templated(
                self.choice(PHRASES["two numbers"]),
                a=a,
                b=b,
                high=max(a, b),
                low=min(a, b),
                verdict="Yes" if a > b else "No",
                relation="more" if a > b else "less",
            )
        a, count = self.rng.randint(1, 10), self.rng.randint(3, 10)
        question, numbers = self.choice(
            [
                (f"Count from {a} to {a + count}.", range(a, a + count + 1)),
                (f"Count to {count}.", range(1, count + 1)),
                (f"Count down from {count}.", range(count, 0, -1)),
            ]
        )
        return [Turn(question, f"{', '.join(map(str, numbers))}.")]

    def word_problem(self) -> list[Turn]:
        """Ask a word problem with two numbers."""
        a, b = self.rng.randint(2, 15), self.rng.randint(1, 10)
        if sum_held_out(a, b) or a == b:
            return self.word_problem()
        high, low = max(a, b), min(a, b)
        p, q = self.rng.sample(NAMES, 2)
        return self._templated(
            self.choice(PHRASES["word problems"]),
            p=p,
            q=q,
            a=a,
            b=b,
            high=high,
            low=low,
            sum=a + b,
            difference=high - low,
            product=b * low,
            things=self.choice(COUNTABLE),
        )
