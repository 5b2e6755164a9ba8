"""The prompts that come with the package: four of each category, written for it."""

BUILTIN = {
    "writing": (
        "Write a short letter from a lighthouse keeper to her brother about the first storm of the winter.",
        "Describe a busy train station at six in the morning, in about two hundred words.",
        "Write a polite e-mail that asks a landlord to repair a leaking kitchen tap before the weekend.",
        "Tell the story of a clockmaker who finds a clock that runs backwards. Keep it under 300 words.",
    ),
    "coding": (
        "Write a Python function that finds the longest palindrome in a string, with a docstring.",
        "Write a C function that reverses a singly linked list in place, and explain each step.",
        "Write a SQL query that lists each customer's latest order from customers(id, name) and "
        "orders(id, customer_id, placed_at, total).",
        "Write a Python class for a least recently used cache with get and put, without imports.",
    ),
    "math": (
        "A train leaves at 9:40 and travels 210 km at 84 km/h. When does it arrive? Show the steps.",
        "A shop sells pens at 3 for 2 dollars. How much do 21 pens cost? How many can be had for 30 dollars?",
        "The sum of three consecutive even numbers is 126. Find them and explain how.",
        "A tank fills in 6 hours through one pipe and in 4 hours through another. How long do both take?",
    ),
    "reasoning": (
        "Ann is taller than Bob, Carl is shorter than Bob, Dora is taller than Ann. Order them.",
        "Three boxes are labelled apples, oranges and mixed, and every label is wrong. Which single fruit do "
        "you draw to find out what is in each box, and why?",
        "Every blick is a drum and no drum is red. Can a blick be red? Explain step by step.",
        "Five machines make five toys in five minutes. How long do a hundred need for a hundred toys?",
    ),
    "explaining": (
        "Explain to a ten-year-old why the sky is blue at noon and red in the evening.",
        "What is a hash table? Explain how it finds a key and what happens on a collision.",
        "Explain the difference between weather and climate, with two examples.",
        "How does a bicycle stay upright while it moves? Give the main reasons in a few paragraphs.",
    ),
    "lists": (
        "List the planets of the solar system in order from the sun, with one fact about each.",
        "Give a packing list for a three-day hike in the mountains in autumn, grouped by purpose.",
        "Make a table of five common kitchen herbs, their taste, and a dish for each.",
        "Write a step-by-step recipe for a simple vegetable soup for four people.",
    ),
}
