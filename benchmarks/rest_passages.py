"""Passages of six genres with facts to be quoted and claims to be judged, composed from sentences with slots."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

OF_A_PASSAGE = 4  # questions of each kind
JUDGE = "Answer yes or no."


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a passage; `kind` is "fact" or "yes-no", `answer` what the passage says."""

    kind: str
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Passage:
    genre: str
    text: str
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Genre:
    """Texts with slots; the values of each slot; what is asked of a slot, and what is claimed of it."""

    texts: Sequence[str]
    slots: Mapping[str, Sequence[str]]
    asked: Mapping[str, str]
    claimed: Mapping[str, str]


GENRES = {
    "invoice": Genre(
        (
            "Invoice {number}, issued to {client}. We delivered {count} {goods} from our store in {city} and charge "
            "{price} euros in all, carriage included. Please pay by {due} and quote the number above. Goods remain "
            "ours until they are paid for. Questions go to {clerk} in accounts, who is in the office until noon.",
            "{client} is billed under number {number}. Item one: {goods}, {count} pieces, packed in {city}. Item two: "
            "carriage, free of charge. The sum to pay is {price} euros and falls due on {due}. Late payment costs a "
            "fee of two percent a month. This bill was written by {clerk}.",
            "Thank you for your order! Your {count} {goods} left {city} this morning. For {client} we have written "
            "bill {number} over {price} euros. The money should reach us by {due}; our bank is named overleaf. If a "
            "piece is broken, keep the box and ring {clerk}.",
        ),
        {
            "number": ("RK-4471", "B-90217", "77-3106", "TX-5583", "M-20864", "QL-1195"),
            "client": ("Orchard Dental", "Nolan & Pryce", "Harbour Books", "Hotel Vesper", "Delmont Cycles"),
            "count": ("14", "36", "58", "125", "270", "9"),
            "goods": ("desk lamps", "oak shelves", "steel kettles", "garden chairs", "wall clocks", "paper trays"),
            "city": ("Lindholm", "Castelvo", "Brackwater", "Tessaly", "Norrby"),
            "price": ("318.40", "1,962.75", "86.90", "4,205.10", "733.25"),
            "due": ("3 March", "19 June", "27 October", "8 August", "14 January"),
            "clerk": ("Ms. Okafor", "Mr. Lindqvist", "Ms. Tavares", "Mr. Bramble", "Ms. Ishikawa"),
        },
        {
            "number": "What is the number of the invoice?",
            "price": "How many euros are to be paid?",
            "due": "By which date must it be paid?",
            "clerk": "Who can be asked about the invoice, or wrote it?",
            "city": "From which town did the goods come?",
            "goods": "Which goods were delivered?",
        },
        {
            "goods": "Does the text say that {} were delivered?",
            "client": "Was the invoice written for {}?",
            "city": "Did the goods come from {}?",
            "due": "Is {} the day by which it must be paid?",
            "count": "Were {} pieces delivered?",
        },
    ),
    "timetable": Genre(
        (
            "Line {line} from {start} to {end} leaves at {leave} from platform {platform} and arrives at {arrive}. It "
            "calls at every station but the two in the tunnel. On {day} it does not run. Bicycles travel in the last "
            "coach, and the buffet is closed after eight.",
            "Winter service. The {leave} departure of line {line} begins in {start}, platform {platform}. Travellers "
            "reach {end} at {arrive}, where a bus waits for them. There is no train on {day}. Seats cannot be "
            "reserved, and dogs travel at half the price.",
            "To get to {end} in the evening, take line {line} in {start}: it goes at {leave}, from platform "
            "{platform}, and you are there at {arrive}. Buy the ticket before you board. The line rests on {day}, "
            "when the track is looked after.",
        ),
        {
            "line": ("S7", "R24", "N3", "K51", "T16", "E9"),
            "start": ("Aldermoor", "Vintry", "Polgarth", "Sankt Erik", "Moulins"),
            "end": ("Quayside", "Hallstatt", "Ferrand", "Dunmere", "Opava"),
            "leave": ("17:42", "18:06", "19:13", "20:55", "16:38"),
            "arrive": ("21:27", "22:10", "23:04", "21:51", "22:36"),
            "platform": ("2", "5", "8", "11", "14"),
            "day": ("Monday", "Tuesday", "Thursday", "Saturday", "Sunday"),
        },
        {
            "leave": "At what time does it leave?",
            "arrive": "At what time does it arrive?",
            "line": "Which line is it?",
            "end": "Where does it go to?",
            "day": "On which day does it not run?",
            "start": "Where does it start?",
        },
        {
            "end": "Does it go to {}?",
            "day": "Is {} the day without a train?",
            "platform": "Does it leave from platform {}?",
            "start": "Does it start in {}?",
            "line": "Is it line {}?",
        },
    ),
    "recipe": Genre(
        (
            "{dish} for {people}. Chop the {vegetable} and fry it in {fat} until it is soft. Add {liquid} of stock and "
            "a pinch of {spice}, cover the pot, and let it simmer for {time}. Taste it, add salt, and serve it with "
            "warm bread. What is left keeps for two days in a cold place.",
            "My aunt's {dish} feeds {people}. She warms some {fat} in an iron pan, puts in the sliced {vegetable}, and "
            "stirs. In go {liquid} of stock. After {time} on a small flame comes the {spice}, never earlier, because "
            "it turns bitter. A squeeze of lemon makes it bright.",
            "You need one large {vegetable}, {liquid} of stock, {fat} and {spice}. Cut everything small. Brown it in "
            "the fat, pour the stock over it, season, and wait {time}. That makes {dish} for {people}, and nobody "
            "will ask for more salt.",
        ),
        {
            "dish": ("Shepherd's broth", "Harvest stew", "Fisher soup", "Miller's pot", "Winter hotpot"),
            "people": ("three people", "four people", "six people", "eight people", "ten people"),
            "vegetable": ("pumpkin", "celeriac", "fennel", "cabbage", "leek"),
            "fat": ("butter", "olive oil", "lard", "sesame oil", "goose fat"),
            "liquid": ("750 ml", "1.2 litres", "400 ml", "900 ml", "2 litres"),
            "spice": ("saffron", "nutmeg", "paprika", "caraway", "cumin"),
            "time": ("35 minutes", "50 minutes", "80 minutes", "25 minutes", "two hours"),
        },
        {
            "vegetable": "Which vegetable is used?",
            "liquid": "How much stock is added?",
            "time": "How long does it cook?",
            "spice": "Which spice is used?",
            "dish": "What is the name of the dish?",
            "fat": "In which fat is it fried?",
        },
        {
            "vegetable": "Is {} in the dish?",
            "spice": "Is the dish seasoned with {}?",
            "fat": "Is it fried in {}?",
            "people": "Is it a dish for {}?",
            "time": "Does it cook for {}?",
        },
    ),
    "letter": Genre(
        (
            "Dear {friend}, we arrived in {place} on {day} after a slow crossing. {child} has a cold but insists on "
            "swimming. Our room looks over the {view}, and it costs us {price} a night. I read {book} in two evenings "
            "and shall send it to you. The post goes at five, so I must stop here.",
            "{friend}, my dear, you will laugh! On {day} I sold the car and took a boat to {place}. {child} came, "
            "with a suitcase full of stones. For {price} a night we have a kitchen and a window on the {view}. "
            "Tell me how you liked {book}; I left it on your stairs.",
            "I am sorry, {friend}, that I have not written. Since {day} we live in {place}, in a house behind the "
            "{view}, for {price} a night until we know more. {child} goes to school by boat. Could you lend me {book} "
            "again? My copy fell into the bath.",
        ),
        {
            "friend": ("Marguerite", "Anselm", "Yusuf", "Beatrix", "Leopold"),
            "place": ("Port Ellery", "Kastrup", "San Telmo", "Skerrow", "Varna"),
            "day": ("Wednesday", "Friday", "Monday", "Saturday", "Tuesday"),
            "child": ("Little Tom", "Our Clara", "Young Ravi", "Baby Ines", "My son Otto"),
            "view": ("lighthouse", "fish market", "old mill", "botanic garden", "tram depot"),
            "price": ("42 crowns", "65 crowns", "18 crowns", "90 crowns", "27 crowns"),
            "book": ("The Glass Canal", "Nine Winters", "A Map of Salt", "The Other Orchard", "Slow Thunder"),
        },
        {
            "place": "In which place is the writer?",
            "book": "Which book is named?",
            "price": "What does a night cost?",
            "view": "What is near the house or seen from the window?",
            "day": "Which day of the week is named?",
            "friend": "To whom is the letter written?",
        },
        {
            "place": "Is the writer in {}?",
            "view": "Does the text name the {}?",
            "day": "Does the text name {}?",
            "friend": "Is the letter written to {}?",
            "book": "Is the book called {}?",
        },
    ),
    "news": Genre(
        (
            "{town}. The council voted {vote} on {day} to close the {building}, which was opened in {year}. "
            "{speaker}, who leads the opposition, spoke of a black day. Repairs would have cost {cost} crowns. The "
            "staff move to the new hall next spring, and the tower will be kept for the clock's sake.",
            "After the storm the {building} of {town} stays shut. Engineers put the damage at {cost} crowns. Built in "
            "{year}, it had never been closed. On {day} the council decided {vote} to rebuild it. \"We shall be back "
            "within two winters,\" said {speaker}, to applause from the gallery.",
            "A fire in the {building} kept {town} awake on {day}. Nobody was hurt. {speaker}, head of the brigade, "
            "praised the neighbours. The house of {year} was insured for {cost} crowns. The council had voted {vote} "
            "for new alarms only a month ago.",
        ),
        {
            "town": ("Ostermark", "Belcastro", "Winthrop", "Larvik", "Puente Alto"),
            "vote": ("17 to 12", "23 to 4", "9 to 8", "31 to 15", "14 to 11"),
            "day": ("Thursday", "Monday", "Friday", "Tuesday", "Sunday"),
            "building": ("swimming hall", "corn exchange", "city theatre", "west station", "public library"),
            "year": ("1887", "1911", "1934", "1958", "1902"),
            "speaker": ("Helga Brandt", "Samuel Oduya", "Rosa Quint", "Ivan Petrov", "Mairi Blake"),
            "cost": ("640,000", "2.3 million", "85,000", "1.7 million", "410,000"),
        },
        {
            "vote": "What was the result of the vote?",
            "building": "Which building is it about?",
            "year": "From which year is the building?",
            "speaker": "Which person is named?",
            "cost": "What sum in crowns is named?",
            "town": "In which town is it?",
        },
        {
            "town": "Is it about {}?",
            "building": "Is it about the {}?",
            "day": "Does the text name {}?",
            "speaker": "Is {} named?",
            "year": "Is the building from {}?",
        },
    ),
    "manual": Genre(
        (
            "Before you switch on the {device}, fill the tank with {fluid} up to the {mark} line. Press the {button} "
            "button for {time}. The lamp turns {colour} when it is ready. Clean the {part} once a week. If the display "
            "shows {code}, pull the plug and let the device cool down.",
            "{code} on the display means that the {part} is blocked. Take it out and rinse it. Then fill in {fluid}, "
            "not above the {mark} line, and hold {button} for {time}. A {colour} lamp tells that the {device} works "
            "again. Do not use force, and keep children away.",
            "Care of your {device}: use only {fluid}, and never more than the {mark} line shows. Each month, hold the "
            "{button} button for {time} and wait for the {colour} lamp. Error {code} calls for a new {part}, which "
            "any dealer has. Screws are not to be opened.",
        ),
        {
            "device": ("steam iron", "humidifier", "coffee maker", "carpet cleaner", "bread oven"),
            "fluid": ("distilled water", "rain water", "vinegar", "soft soap", "cold tea"),
            "mark": ("upper", "middle", "lower", "dotted", "yellow"),
            "button": ("RESET", "START", "FLUSH", "MODE", "BOOST"),
            "time": ("6 seconds", "15 seconds", "two minutes", "40 seconds", "9 seconds"),
            "colour": ("green", "blue", "white", "orange", "purple"),
            "part": ("filter", "nozzle", "seal", "valve", "brush"),
            "code": ("E14", "F-02", "H7", "C31", "P-9"),
        },
        {
            "code": "Which code does the display show?",
            "fluid": "What is filled in?",
            "button": "Which button is pressed?",
            "time": "How long is the button pressed?",
            "colour": "Which colour has the lamp?",
            "part": "Which part is named?",
        },
        {
            "device": "Is the text about a {}?",
            "fluid": "Does the text name {}?",
            "colour": "Is the lamp {}?",
            "part": "Does the text name the {}?",
            "button": "Is the button called {}?",
        },
    ),
}  # fmt: skip


def passages(count: int, seed: int = 0) -> Iterator[Passage]:
    """`count` passages, the genres in turn; of a passage's claims half are true."""
    rng = random.Random(seed)
    for number in range(count):
        name = list(GENRES)[number % len(GENRES)]
        genre = GENRES[name]
        values = {slot: rng.choice(choices) for slot, choices in genre.slots.items()}
        text = rng.choice(genre.texts).format(**values)
        questions = [
            Question("fact", genre.asked[slot], values[slot]) for slot in rng.sample(sorted(genre.asked), OF_A_PASSAGE)
        ]
        truths = ["yes", "no"] * (OF_A_PASSAGE // 2)
        rng.shuffle(truths)
        for slot, truth in zip(rng.sample(sorted(genre.claimed), OF_A_PASSAGE), truths, strict=True):
            others = [value for value in genre.slots[slot] if value != values[slot]]
            value = values[slot] if truth == "yes" else rng.choice(others)
            questions.append(Question("yes-no", f"{genre.claimed[slot].format(value)} {JUDGE}", truth))
        yield Passage(name, text, tuple(questions))
